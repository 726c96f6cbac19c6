"""Ray Tune's question for the next trial, answered by the study."""

from typing import Any

from ray.tune.search import Searcher

from app.tuning.results import NUMBER, VALUES
from app.tuning.study import SearchStudy


class StudySearcher(Searcher):  # type: ignore[misc] # Ray has no types
    """Proposes what the study proposes, until there are enough trials.

    Ray's ``OptunaSearch`` is not used: it files a trial that a scheduler stopped as complete, with its value at that
    time, and loses every running trial with its process. What becomes of trials is written by the ``Ledger``.
    """

    def __init__(self, study: SearchStudy, most: int) -> None:
        super().__init__()
        self._study, self._most = study, most

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # noqa: ARG002
        """The configuration of the next trial, or that there is none."""
        proposal = self._study.ask(self._most)
        if proposal is None:
            return str(Searcher.FINISHED)
        return {NUMBER: proposal.number, VALUES: proposal.values}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """The ledger has it."""

    def save(self, checkpoint_path: str) -> None:
        """Everything is in the study."""

    def restore(self, checkpoint_path: str) -> None:
        """A search goes on from its study, not from Ray Tune's files."""
