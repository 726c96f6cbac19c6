"""Compile on this machine, without Ray: python -m app.compile RECIPE [key=value …]"""

import sys
from collections.abc import Sequence

from app.compile.run import compile_model
from app.config import load_recipe
from app.config.overrides import require_once
from app.errors import RayloomError
from app.runs import Run, execute, read_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Compile as ``jobs.compile`` does. Return 0 on success, 1 on failure, or 2 if the recipe is invalid."""
    arguments = read_arguments("app.compile", argv, __doc__)
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
