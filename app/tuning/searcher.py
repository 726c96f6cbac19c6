"""Ray Tune's question for the next trial, answered by the study."""

from collections.abc import Callable
from typing import Any

from ray.tune.search import Searcher

from app.tuning.promotion import Promotion
from app.tuning.results import LAST_REPORTED_EPOCH, NUMBER, VALUES
from app.tuning.study import Proposal, SearchStudy


class StudySearcher(Searcher):  # type: ignore[misc] # Ray has no types
    """Proposes what the study proposes, until there are enough trials.

    Ray's ``OptunaSearch`` is not used: it files a trial that a scheduler stopped as complete, with its value at that
    time, and loses every running trial with its process. What becomes of trials is written by the ``Ledger``.
    """

    def __init__(self, study: SearchStudy, most: int, promotion: Promotion | None, at_once: Callable[[], int]) -> None:
        """``at_once`` returns how many trials should run now. It is called for each proposal: clusters change size."""
        super().__init__()
        self._study, self._most, self._promotion, self._at_once = study, most, promotion, at_once
        self._running = 0

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # noqa: ARG002
        """Return the configuration of the next trial, FINISHED if there is none, or None if there is none yet."""
        if self._running >= self._at_once():
            return None
        proposal = self._next()
        if proposal is None:
            return None if self._running else str(Searcher.FINISHED)
        self._running += 1
        return {
            NUMBER: proposal.number,
            VALUES: proposal.values,
            LAST_REPORTED_EPOCH: self._study.last_reported_epoch(proposal.number),
        }

    def _next(self) -> Proposal | None:
        """A trial that is promoted, else a new one, else the best of those that wait, once nobody runs beside them."""
        number = self._promotion.promote() if self._promotion else None
        if number is None and (new := self._study.ask(self._most)):
            return new
        if number is None and self._promotion and not self._running:
            number = self._promotion.promote(at_least=1)
        return None if number is None else self._study.go_on(number)

    def on_trial_complete(
        self,
        trial_id: str,  # noqa: ARG002
        result: dict[str, Any] | None = None,  # noqa: ARG002
        error: bool = False,  # noqa: ARG002
    ) -> None:
        """What became of it, the ledger writes."""
        self._running -= 1

    def save(self, checkpoint_path: str) -> None:
        """Everything is in the study."""

    def restore(self, checkpoint_path: str) -> None:
        """A search goes on from its study, not from Ray Tune's files."""
