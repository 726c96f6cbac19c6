"""The sources of a resumed run: those that its recipe adds, and the batch from which new shares apply."""

from collections.abc import Sequence

from upath import UPath

from app.artifacts import CHECKPOINTS, DATA
from app.checksums import VerifiedFolder
from app.config import Recipe
from app.data.prepared import DataReport, GrowingData, PreparedData
from app.runs import Run
from app.tasks import prepare
from app.training.checkpoints.reader import read_state
from app.training.checkpoints.store import CheckpointStore
from app.training.data.mixture import Mixture, MixturePeriod, recorded_periods, save_periods, with_period


def adds_sources(run: Run) -> bool:
    """Return whether the recipe of a resumed run has more sources than the run had before."""
    if not run.recipe.data.sources:
        return False
    periods = recorded_periods(run.folder)
    return bool(periods) and len(periods[-1].names) < len(run.recipe.data.sources)


def with_added_sources(run: Run, recipe: Recipe, data: PreparedData) -> PreparedData:
    """Return the saved data of a run, with the sources that its recipe adds. Write nothing but shards.

    Raises:
        DataError: an added source does not suit the run, or the existing sources have changed.
    """
    if not adds_sources(run):
        return data
    assert isinstance(data, GrowingData)  # recipes of other tasks with several sources are refused
    return data.grown(prepare(recipe))


def planned_periods(recipe: Recipe, run_folder: UPath, data: PreparedData) -> list[MixturePeriod]:
    """Return the recorded sources and shares of a run, and those of the recipe from the newest checkpoint on."""
    mixture, store = Mixture.of(recipe.data, data), CheckpointStore(run_folder / CHECKPOINTS)
    if mixture is None:
        return []
    state = store.newest_readable(store.committed(), lambda saved: read_state(VerifiedFolder(store.folder_of(saved))))
    epoch, number = (state.position.epoch, state.position.batches_done) if state else (1, 0)
    return with_period(recorded_periods(run_folder), mixture.period(epoch, number))


def record_mixture(run: Run, periods: Sequence[MixturePeriod], data: PreparedData) -> None:
    """Record the sources and their shares, as planned."""
    if adds_sources(run):
        assert isinstance(data, GrowingData)
        # It goes first: without it, the recorded sources would have no samples.
        data.reference.save_grown(run.folder / DATA)
        DataReport.of(run.recipe.data.source, data).save(run.folder)
    save_periods(run.folder, periods)
