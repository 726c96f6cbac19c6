"""A reader of training has few modules to open."""

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from upath import UPath

import app
from app.config import load_recipe
from app.tasks import prepare
from app.training.plan import TrainingPlan
from app.training.session import train
from app.training.stop_request import StopRequest
from app.training.worker import start_worker
from tests.helpers import ROOT

APP = Path(app.__file__).parent
MAX_MODULES = 75


@contextmanager
def entered_modules() -> Iterator[set[str]]:
    """Fill a set with the modules of ``app`` whose functions this thread and new threads call inside the context."""
    files: set[str] = set()
    modules: set[str] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:  # a function, not a body that an import runs
            files.add(code.co_filename)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield modules
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        modules |= {str(Path(file).relative_to(APP)) for file in files if Path(file).is_relative_to(APP)}


def test_three_steps_enter_few_modules(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes/digits.yaml", ["train.workers=1", "train.max_steps=3"])
    data, worker = prepare(recipe), start_worker(recipe.train)
    plan = TrainingPlan.of(recipe, data)
    with entered_modules() as modules:
        ending = train(plan, data, worker, UPath(tmp_path))
    assert (ending.step, ending.stop_request) == (3, StopRequest.NONE)
    assert {"training/loop.py", "training/checkpoints/writer.py"} <= modules  # of this thread, and of another
    assert len(modules) <= MAX_MODULES, " ".join(sorted(modules))
