"""Run one step: python -m benchmarks.gpu.step MEASURE OPTIONS FIGURES

MEASURE is the import string of the step's function, and OPTIONS are its options as JSON. Each figure is appended to the
file FIGURES as soon as it is measured.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

from app.import_string import import_attribute
from benchmarks.gpu.bench import Bench, default_device
from benchmarks.gpu.findings import append_figure


def main() -> None:
    """Run the step in this process."""
    measure, options, figures = sys.argv[1:]
    bench = Bench(default_device(), Path(os.environ["KIT"]), partial(append_figure, Path(figures)))
    import_attribute(measure)(bench, **json.loads(options))


if __name__ == "__main__":
    main()
