"""The search algorithm that Ray Tune asks for the next trial. It takes its proposals from the study."""

from collections.abc import Callable
from typing import Any

from ray.tune.search import Searcher

from app.tuning.promotion import Promotion
from app.tuning.study import Proposal, SearchStudy
from app.tuning.trial_config import LAST_REPORTED_EPOCH, NUMBER, VALUES


class StudySearcher(Searcher):  # type: ignore[misc] # Ray has no types
    """Proposes the study's trials until there are enough.

    Ray's ``OptunaSearch`` records a trial that a scheduler stopped as complete, with its value at that time. It also
    loses all running trials with its process. Here ``StudyCallback`` records the outcomes.
    """

    def __init__(
        self, study: SearchStudy, max_trials: int, promotion: Promotion | None, concurrency: Callable[[], int]
    ) -> None:
        """``concurrency`` returns how many trials should run now. It is called per proposal: clusters change size."""
        super().__init__()
        self._study, self._max_trials, self._promotion = study, max_trials, promotion
        self._concurrency = concurrency
        self._running = 0

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # noqa: ARG002
        """Return the configuration of the next trial, FINISHED if there is none, or None if there is none yet."""
        if self._running >= self._concurrency():
            return None
        proposal = self._next()
        if proposal is None:
            # Trials that run may come back: paused and then promoted, or put back because their actor was busy.
            return None if self._running else str(Searcher.FINISHED)
        self._running += 1
        return {
            NUMBER: proposal.number,
            VALUES: proposal.values,
            LAST_REPORTED_EPOCH: self._study.last_reported_epoch(proposal.number),
        }

    def _next(self) -> Proposal | None:
        """Return a promoted trial, else a new one. Once no other trial runs, return the best paused one."""
        number = self._promotion.promote() if self._promotion else None
        if number is None and (new := self._study.ask(self._max_trials)):
            return new
        if number is None and self._promotion and not self._running:
            number = self._promotion.promote(at_least=1)
        return None if number is None else self._study.unpause(number)

    def on_trial_complete(
        self,
        trial_id: str,  # noqa: ARG002
        result: dict[str, Any] | None = None,  # noqa: ARG002
        error: bool = False,  # noqa: ARG002
    ) -> None:
        """Count the trial as ended. Its outcome is recorded by ``StudyCallback``."""
        self._running -= 1

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: everything is in the study."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing: a search resumes from its study, not from Ray Tune's files."""
