"""Ray's private parts that a search needs, each use with its reason. No other module of ``app/tuning`` touches them."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from ray.train import get_context
from ray.train.v2._internal.execution.callback import TrainContextCallback
from ray.tune.experiment import Trial
from ray.tune.schedulers import AsyncHyperBandScheduler, MedianStoppingRule, PopulationBasedTraining, TrialScheduler
from ray.util.queue import Empty, Queue

from app.tuning.space import Value
from app.tuning.trial_config import CLONED, EPOCH, LAST_REPORTED_EPOCH, NUMBER, VALUE, VALUES

CONTINUE, STOP = "continue", "stop"
"""A worker's turn: train the next epoch, or return because the run is about to stop."""

_POLL_S = 0.2


class WaitAfterReport(TrainContextCallback):  # type: ignore[misc] # Ray has no types
    """Hold the first worker after each report until ``turns`` has an entry. The others wait at their next sync.

    Ray Train's public callbacks run in the controller. Only this internal one runs in the workers.
    """

    def __init__(self, turns: Queue) -> None:
        self._turns = turns

    @contextmanager
    def on_report(self) -> Iterator[None]:
        """Wait after the report. Ray Train enters this context in each worker."""
        yield
        while get_context().get_world_rank() == 0:
            # Poll: an endless wait of a killed worker would live on in the queue and take its successor's turn.
            with suppress(Empty):
                if self._turns.get(timeout=_POLL_S) == STOP:
                    # Later epochs and restarted workers have to find it, too.
                    self._turns.put(STOP)
                return


class Halving(AsyncHyperBandScheduler):  # type: ignore[misc] # Ray has no types
    """Ray Tune's asynchronous HyperBand, with infinite values as the worst of all.

    Ray Tune compares with a percentile. Between an infinite and a finite value it is NaN, which stops no trial, and
    the public API offers no other comparison. So the largest float is recorded instead of infinity.
    """

    def on_trial_result(self, tune_controller: object, trial: Trial, result: dict[str, Any]) -> str:
        """Judge a trial after an epoch."""
        decision = str(super().on_trial_result(tune_controller, trial, result))
        self._bound_rewards(trial)
        return decision

    def on_trial_complete(self, tune_controller: object, trial: Trial, result: dict[str, Any]) -> None:
        """Record the last epoch of a trial."""
        super().on_trial_complete(tune_controller, trial, result)
        self._bound_rewards(trial)

    def _bound_rewards(self, trial: Trial) -> None:
        for recorded in (recorded for bracket in self._brackets for _, recorded in bracket._rungs):
            if trial.trial_id in recorded:
                recorded[trial.trial_id] = max(recorded[trial.trial_id], -sys.float_info.max)


class MedianRule(MedianStoppingRule):  # type: ignore[misc] # Ray has no types
    """Ray Tune's median rule, which neither pauses trials nor forgets those of an interrupted search."""

    def add_past_trial(self, trial: object, results: list[dict[str, Any]]) -> None:
        """Compare later trials with one that has ended. The public API takes only running trials."""
        # Ray looks at the last result of each trial that it knows.
        if finite := [result for result in results if math.isfinite(result[VALUE])]:
            self._results[trial] += finite

    def on_trial_result(self, tune_controller: object, trial: Trial, result: dict[str, Any]) -> str:
        """Judge a trial after an epoch, but not after one that has no number, which would spoil its mean for good."""
        if not math.isfinite(result[VALUE]):
            return str(TrialScheduler.CONTINUE)
        return str(super().on_trial_result(tune_controller, trial, result))

    def _on_insufficient_samples(self, tune_controller: object, trial: Trial, time: float) -> str:  # noqa: ARG002
        """Continue a trial that cannot be judged yet. Ray Tune would pause it, and its actor would idle."""
        return str(TrialScheduler.CONTINUE)


class Population(PopulationBasedTraining):  # type: ignore[misc] # Ray has no types
    """Ray Tune's population-based training, for trials of which each has only some of the keys."""

    def __init__(
        self, mutations: dict[str, Any], clip: Callable[[Mapping[str, Value]], dict[str, Value]], **settings: Any
    ) -> None:
        """``mutations`` says how each key is drawn anew. ``clip`` puts scaled values back into their ranges."""
        self._mutations, self._clip = mutations, clip
        super().__init__(hyperparam_mutations={VALUES: mutations}, **settings)

    def on_trial_add(self, tune_controller: object, trial: Trial) -> None:  # noqa: ARG002
        """Add a trial. Hide the searcher, which Ray Tune refuses here although ours only starts trials."""
        super().on_trial_add(SimpleNamespace(search_alg=None), trial)

    def _get_new_config(self, trial: Trial, trial_to_clone: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the donor's perturbed values and the epoch of its checkpoint, under the trial's own number.

        The public ``custom_explore_fn`` sees neither the trial nor the donor's epoch.
        """
        donor_values = trial_to_clone.config[VALUES]
        # Ray Tune would add every key that may change, even one of a branch that the donor did not take.
        mutations = {key: mutation for key, mutation in self._mutations.items() if key in donor_values}
        self._hyperparam_mutations = {VALUES: mutations}
        config, operations = super()._get_new_config(trial, trial_to_clone)
        config[VALUES] = self._clip(config[VALUES])
        epoch = self._trial_state[trial_to_clone].last_result[EPOCH]
        return {**config, NUMBER: trial.config[NUMBER], LAST_REPORTED_EPOCH: epoch, CLONED: True}, operations
