"""Measure compiled models beside PyTorch and ONNX Runtime, and write RESULTS.md: python -m benchmarks.compile"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from app.engines.architecture import usable_cores
from app.errors import RayloomError
from app.storage import to_path
from benchmarks.compile.compiled import ModelUnderTest
from benchmarks.compile.findings import Compiled, Findings
from benchmarks.compile.goals import ENCODER
from benchmarks.compile.models import MODELS, Model
from benchmarks.compile.report import report
from benchmarks.machine import Conditions

RESULTS = Path(__file__).with_name("RESULTS.md")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything, print what was found and keep it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), help="names of models")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each engine at each setting")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of every engine, default: all cores")
    parser.add_argument(
        "--weights", nargs="*", default=[], metavar="NAME=URI", help="weights folder of a train run, for a model"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="file that is written")
    arguments = parser.parse_args(argv)
    weights = dict(weight.split("=", 1) for weight in arguments.weights)
    text = report(measure([MODELS[name] for name in arguments.models], weights, arguments.threads, arguments.rounds))
    arguments.output.write_text(text, encoding="utf-8")
    print(text)


def measure(models: Sequence[Model], weights: dict[str, str], threads: int, num_rounds: int) -> Findings:
    """Every model in turn; one that Rayloom refuses, for instance since its data is not here, is left out.

    Args:
        weights: URIs of weights folders by the model's name; the others are trained, or made as the model says.
    """
    conditions = Conditions()
    compiled: dict[str, Compiled] = {}
    left_out, starts = {}, []
    for model in models:
        with tempfile.TemporaryDirectory(prefix="bench-compile-") as temporary:
            folder, name = Path(temporary), model.name
            try:
                found = to_path(weights[name]) if name in weights else model.make(model, folder)
                under_test = ModelUnderTest(model, found, folder / "compiled", threads)
                compiled[name] = under_test.run(num_rounds)
                if name == ENCODER:
                    starts = under_test.measure_starts(num_rounds)
            except RayloomError as error:
                left_out[name] = str(error)
                print(f"{name}: left out: {error}", flush=True)
    return Findings(compiled, left_out, starts, threads, num_rounds, conditions)


if __name__ == "__main__":
    main()
