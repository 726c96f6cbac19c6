"""One model through the product's own compile, and then through a race of its variants."""

from pathlib import Path

from upath import UPath

from app.artifacts import RECIPE_FILE
from app.compile.compilation import Compilation
from app.compile.publication import publish
from app.compile.source import resized
from app.compile.source_model import load_source_model
from app.compile.variants import requested_variants
from app.config import load_recipe
from app.data.labelled import LabelledData
from app.repository.repository import Repository
from app.storage import to_path
from benchmarks.compile.coldstart import Starts, measure_starts
from benchmarks.compile.contenders import contenders
from benchmarks.compile.findings import Compiled
from benchmarks.compile.models import Model
from benchmarks.compile.speed import race

_ENGINE = "openvino"


class ModelUnderTest:
    """A model whose variants are made, evaluated and chosen from."""

    def __init__(self, model: Model, weights: UPath, folder: Path, threads: int) -> None:
        """Compile it. Raises CompileError if no variant passes the gates."""
        self._model, self._weights, self._folder, self._threads = model, weights, folder, threads
        folder.mkdir()
        recipe = load_recipe(str(weights / RECIPE_FILE))
        self._subject = load_source_model(weights, recipe, threads)
        self._compilation = Compilation(
            self._subject, recipe.compile, requested_variants(recipe.compile), folder, self._tell
        )
        self._compilation.evaluate()
        self._choice = self._compilation.choose()

    def run(self, num_rounds: int) -> Compiled:
        """Time the variants beside PyTorch, and gather what is known of them."""
        compilation, subject = self._compilation, self._subject
        records = {record.precision: record for record in compilation.records if record.engine == _ENGINE}
        files = {precision: compilation.path_of(record) for precision, record in records.items()}
        rows = {
            setting: resized(subject.rows_by_length[setting.length], setting.batch_size)
            for setting in self._model.settings
        }
        return Compiled(
            model=self._model,
            records=records,
            refused={reason.precision: reason.reason for reason in compilation.skipped if reason.engine == _ENGINE},
            chosen=self._choice.record.variant,
            race=race(contenders(files, self._weights, subject.signature), rows, self._threads, num_rounds),
        )

    def measure_starts(self, num_rounds: int) -> list[Starts]:
        """Publish what was chosen, and time new processes that load it, up to their first answer to a text."""
        storage, name = self._folder / "storage", self._model.name
        repository, run = Repository(to_path(storage)), to_path(self._folder)
        manifest = publish(self._compilation, self._choice, name, repository, run)
        data = self._subject.data
        assert isinstance(data, LabelledData)
        text = str(data.validation.split.inputs[0])
        return measure_starts(storage, f"{manifest.name}/{manifest.version}", self._threads, text, num_rounds)

    def _tell(self, line: str) -> None:
        print(f"{self._model.name}: {line}", flush=True)
