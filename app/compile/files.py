"""The files that are made of one source model: ONNX files, each checked against PyTorch, and TensorRT plans."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from pydantic import BaseModel

from app.checksums import sha256_of_file
from app.compile.evaluator import Evaluator
from app.compile.onnx_files import size_of
from app.compile.parity import Parity
from app.compile.quantization.search import find_quantization, quantize_fp8
from app.compile.source import Source
from app.compile.timing import Concurrency
from app.compile.variants import BUILT_AHEAD, Variant
from app.config import CompileConfig, ComputePrecision, EngineName, Precision
from app.engines.base import Engine, EngineSettings
from app.engines.registry import open_engine, runs_plans
from app.engines.tensorrt.build import build_plan
from app.engines.tensorrt.library import Flavour
from app.engines.tensorrt.manifest import BuildSettings
from app.errors import CompileError, EngineError
from app.repository.manifest import MODEL_FILE, PLAN_FILE, Quantization

_FLOATS: dict[ComputePrecision, Precision] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}

Log = Callable[[str], None]


class ModelFile(BaseModel):
    """An ONNX file of one precision."""

    precision: ComputePrecision
    sparse: bool
    """Whether two of four weights are zero."""

    size_bytes: int
    sha256: str
    parity: Parity | None
    """None if no engine of this machine runs the file."""

    failures: tuple[str, ...]
    """The gates that the file fails."""

    quantization: Quantization | None

    @property
    def name(self) -> str:
        """The file's name in messages."""
        return f"{self.precision}{' 2-of-4' * self.sparse}"

    @property
    def passes(self) -> bool:
        """Whether the file was evaluated and passes every gate."""
        return self.parity is not None and not self.failures

    @property
    def verdict(self) -> str:
        """The result of the gates in words."""
        if self.parity is None:
            return "not evaluated: this machine does not run it"
        return "; ".join(self.failures) or "passed"

    def __str__(self) -> str:
        seen = f"{self.parity}{f' (refused: {self.verdict})' * bool(self.failures)}" if self.parity else self.verdict
        return f"file {self.name}: {self.size_bytes / 1e6:.2f} MB, {seen}"


class ModelFiles:
    """The files of a source model in a folder, each made when it is first needed."""

    def __init__(
        self,
        source_model: Source,
        config: CompileConfig,
        int8_engines: Sequence[EngineName],
        folder: Path,
        log: Log,
    ) -> None:
        """Create the folder.

        Args:
            int8_engines: engines on which int8 files have to pass the gates, beside the reference runtime.
        """
        folder.mkdir(exist_ok=True)
        self.source_model = source_model
        self.evaluator = Evaluator(source_model, config.gates, int8_engines)
        self._config = config
        self._folder = folder
        self._log = log
        self._made: dict[ComputePrecision, ModelFile | CompileError | EngineError] = {}

    def get(self, precision: ComputePrecision) -> ModelFile:
        """Return the file of a precision, which may fail gates.

        Raises:
            CompileError: the file cannot be made.
            EngineError: an engine on which the file has to be evaluated cannot run it.
        """
        if precision not in self._made:
            try:
                self._made[precision] = self._make(precision)
                self._log(str(self._made[precision]))
            except (CompileError, EngineError) as error:
                # An error is kept, too, because making the file again would only fail again.
                self._made[precision] = error
        made = self._made[precision]
        if not isinstance(made, ModelFile):
            raise made
        return made

    @property
    def made(self) -> list[ModelFile]:
        """The files that were made so far."""
        return [file for file in self._made.values() if isinstance(file, ModelFile)]

    def onnx_path(self, precision: ComputePrecision) -> Path:
        """Return the path of a precision's ONNX file. Raises CompileError if it cannot be made."""
        self.get(precision)
        return self._onnx_path(precision)

    def size_bytes(self, variant: Variant) -> int:
        """Return the size of what the variant's engine opens: of an ONNX file with its shards, a plan or a module."""
        return self.source_model.size_bytes if variant.runs_module else size_of(self.engine_path(variant))

    def engine_path(self, variant: Variant) -> Path:
        """Return the path of what the variant's engine opens: an ONNX file, or a TensorRT plan."""
        if runs_plans(variant.engine):
            return self._plan(cast(Flavour, variant.engine), variant.precision, ())
        return self.onnx_path(variant.file)

    def open(self, variant: Variant, concurrency: Concurrency) -> Engine:
        """Open a variant's engine, which the caller closes.

        Raises:
            CompileError: the variant's ONNX file or TensorRT plan cannot be made.
            EngineError: the engine cannot run it on this machine.
        """
        settings = EngineSettings(variant.precision, concurrency.threads, concurrency.streams, variant.device)
        # The module needs no file, so a model that cannot be exported still runs.
        if variant.runs_module:
            return self.source_model.open_module(settings)
        return open_engine(variant.engine, self.engine_path(variant), settings)

    def build_ahead(self, precision: ComputePrecision) -> Path:
        """Build a TensorRT plan for ``compile.targets``, and return its folder. This machine cannot run it."""
        return self._plan(BUILT_AHEAD, precision, tuple(self._config.targets)).parent

    def _plan(self, flavour: Flavour, precision: ComputePrecision, targets: tuple[str, ...]) -> Path:
        plan = self._folder / "-".join((flavour, precision, *targets)) / PLAN_FILE
        # Building takes minutes, and one plan serves all settings.
        if not plan.exists():
            onnx_path = self.onnx_path(precision)
            settings = BuildSettings(
                precision=precision,
                profile=self.source_model.profile(self._config.batch_sizes),
                sparse_weights=self.source_model.sparse,
                workspace_mb=self._config.workspace_mb,
            )
            plan.parent.mkdir(exist_ok=True)
            build_plan(flavour, onnx_path, plan, settings, targets)
        return plan

    def _onnx_path(self, precision: ComputePrecision) -> Path:
        # A folder for each, because shards belong to the one ONNX file beside them.
        return self._folder / precision / MODEL_FILE

    def _make(self, precision: ComputePrecision) -> ModelFile:
        path, source = self._onnx_path(precision), self.source_model
        path.parent.mkdir(exist_ok=True)
        if precision in _FLOATS:
            source.export(path, _FLOATS[precision], self._config.shard_mb)
            quantization = None
        else:
            quantization = self._quantize(precision, path)
        parity = self._parity(precision, path)
        return ModelFile(
            precision=precision,
            sparse=source.sparse,
            size_bytes=size_of(path),
            sha256=sha256_of_file(path),
            parity=parity,
            failures=self._failures(precision, path, parity),
            quantization=quantization,
        )

    def _quantize(self, precision: ComputePrecision, path: Path) -> Quantization:
        fp32, calibration = self.get("fp32"), self._config.calibration
        # An int8 file of a wrong float file would only hide what is wrong.
        if fp32.failures:
            raise CompileError(f"it is made from the fp32 file, in which {'; '.join(fp32.failures)}").of(
                "fp32.fails_gates"
            )
        fp32_path, samples = self._onnx_path("fp32"), self.source_model.calibration_batches(calibration.samples)
        if precision == "fp8":
            return quantize_fp8(fp32_path, samples, path, self._log, self._config.shard_mb)
        self.evaluator.leave_out_engines(fp32_path)
        # Only int8 is searched for: fp8 has no clipping to choose, and no fine-tuning.
        finetune = None
        if (given := self._config.int8.finetune) is not None:
            finetune = partial(self.source_model.write_finetuned, config=given, log=self._log)
        evaluate, shard_mb = self.evaluator.verdict, self._config.shard_mb
        return find_quantization(fp32_path, samples, calibration, evaluate, path, self._log, finetune, shard_mb)

    def _failures(self, precision: ComputePrecision, path: Path, parity: Parity | None) -> tuple[str, ...]:
        """Return the failed gates. An int8 file is evaluated on several engines, the others on one at most."""
        if precision == "int8":
            return self.evaluator.verdict(path).failures
        return self.evaluator.failures(parity, precision) if parity else ()

    def _parity(self, precision: ComputePrecision, path: Path) -> Parity | None:
        """Evaluate the file. None if this machine cannot run its precision. It has to run fp32."""
        try:
            return self.evaluator.parity(path, precision)
        except EngineError:
            if precision == "fp32":
                raise
            return None
