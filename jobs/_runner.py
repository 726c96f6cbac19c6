"""The main function of every job: read the recipe, keep a run, and end with a RESULT line."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from app.config import Recipe, load_job_recipe, title_of
from app.config.overrides import require_once
from app.errors import RayloomError
from app.process_state import sigterm_calls, spare_loopback
from app.runs import JOB, LOST_JOB, LOST_JOB_KEY, Result, Run, Step, execute, read_arguments
from jobs._metadata_internals import SUBMISSION_KEY, job_metadata


def main(
    job: str, step: Step, argv: Sequence[str] | None = None, start: Callable[[str, Recipe], Run] = Run.start
) -> int:
    """Run a job from its command line. Return 0 on success, 1 if it failed, or 2 if the recipe was refused.

    ``start`` creates the run or finds one to resume. It writes nothing.
    """
    spare_loopback()
    _note_job()
    arguments = read_arguments(f"jobs.{job}", argv)
    try:
        require_once(arguments.overrides)
        recipe = load_job_recipe(job, arguments.recipe, arguments.overrides)
        run = start(job, recipe)
    except RayloomError as error:
        print(f"error: {error}", file=sys.stderr)
        title = title_of(arguments.recipe)
        refused = Result(job=job, run_id="", recipe=title, status="failed", duration_s=0.0, error=str(error))
        print(refused.to_line(), flush=True)
        return 2
    result = execute(run, step)
    print(result.to_line(arguments.json), flush=True)
    return int(result.status == "failed")


def _note_job() -> None:
    """Note the ids of this job and of the lost one that it replaces in the environment, for its runs."""
    metadata = job_metadata()
    for variable, key in ((JOB, SUBMISSION_KEY), (LOST_JOB, LOST_JOB_KEY)):
        if key in metadata:
            os.environ[variable] = metadata[key]


def on_sigterm(request_stop: Callable[[], None], consequence: str) -> AbstractContextManager[None]:
    """On SIGTERM inside the block, print ``consequence`` and call ``request_stop`` instead of ending the job.

    ``ray job stop`` sends this signal.
    """

    def stop() -> None:
        print(f"asked to stop: {consequence}", flush=True)
        request_stop()

    return sigterm_calls(stop)
