"""Compile on this machine, without Ray: python -m app.compile RECIPE [key=value …]"""

import argparse
import sys
from collections.abc import Sequence

from app.compile.run import compile_model
from app.config import load_recipe
from app.config.overrides import require_once
from app.errors import RayloomError
from app.runs import JSON_HELP, Run, execute


def main(argv: Sequence[str] | None = None) -> int:
    """Compile as ``jobs.compile`` does. Return 0 on success, 1 on failure, or 2 if the recipe is invalid."""
    parser = argparse.ArgumentParser(prog="python -m app.compile")
    parser.add_argument("recipe", help="path or URI of a recipe, such as recipes/digits.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as compile.engines=[openvino]")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    arguments = parser.parse_intermixed_args(argv)
    try:
        require_once(arguments.overrides)
        run = Run.start("compile", load_recipe(arguments.recipe, arguments.overrides))
    except RayloomError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = execute(run, compile_model)
    print(result.to_line(arguments.json), flush=True)
    return int(result.status == "failed")


if __name__ == "__main__":
    sys.exit(main())
