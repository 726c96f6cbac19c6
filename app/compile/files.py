"""The ONNX files that are made of one model, each checked against PyTorch."""

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from app.checksums import sha256_of_file
from app.compile.export import export_onnx
from app.compile.judge import Judge
from app.compile.parity import Parity
from app.compile.quantization.search import find_quantization, quantize_fp8
from app.compile.subject import Subject
from app.config import CalibrationConfig, ComputePrecision, Precision
from app.errors import CompileError, EngineError
from app.repository.manifest import Quantization

_FLOATS: dict[ComputePrecision, Precision] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}

Tell = Callable[[str], None]


class ModelFile(BaseModel):
    """What is known of an ONNX file of one precision."""

    precision: ComputePrecision
    sparse: bool
    """Whether two of four weights are zero."""

    size_bytes: int
    sha256: str
    parity: Parity | None
    """None if nothing here runs it."""

    failures: tuple[str, ...]
    """Gates that the file does not hold there."""

    quantization: Quantization | None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.precision}{' 2:4' * self.sparse}"

    @property
    def holds(self) -> bool:
        """Whether it was judged, and every gate holds."""
        return self.parity is not None and not self.failures

    @property
    def verdict(self) -> str:
        """Of the gates, for people."""
        if self.parity is None:
            return "not judged: this machine does not run it"
        return "; ".join(self.failures) or "hold"

    def __str__(self) -> str:
        seen = f"{self.parity}{f' (refused: {self.verdict})' * bool(self.failures)}" if self.parity else self.verdict
        return f"file {self.name}: {self.size_bytes / 1e6:.2f} MB, {seen}"


class ModelFiles:
    """The files of a subject in a folder, each made when it is first asked for."""

    def __init__(
        self, subject: Subject, calibration: CalibrationConfig, judge: Judge, folder: Path, tell: Tell
    ) -> None:
        self._subject = subject
        self._calibration = calibration
        self._judge = judge
        self._folder = folder
        self._tell = tell
        self._made: dict[ComputePrecision, ModelFile | CompileError | EngineError] = {}

    def get(self, precision: ComputePrecision) -> ModelFile:
        """The file of a precision, which may fail gates: then it says so.

        Raises:
            CompileError: it cannot be made.
            EngineError: an engine that has to try it cannot run it.
        """
        if precision not in self._made:
            try:
                self._made[precision] = self._make(precision)
                self._tell(str(self._made[precision]))
            except (CompileError, EngineError) as error:
                self._made[precision] = error
        made = self._made[precision]
        if not isinstance(made, ModelFile):
            raise made
        return made

    @property
    def made(self) -> list[ModelFile]:
        """Those that there are so far."""
        return [each for each in self._made.values() if isinstance(each, ModelFile)]

    def path(self, precision: ComputePrecision) -> Path:
        """Where the file of a precision is. Raises CompileError if it cannot be made."""
        self.get(precision)
        return self._path(precision)

    def _path(self, precision: ComputePrecision) -> Path:
        return self._folder / f"{precision}.onnx"

    def _make(self, precision: ComputePrecision) -> ModelFile:
        path, subject = self._path(precision), self._subject
        if precision in _FLOATS:
            export_onnx(subject.trained.model, subject.signature.inputs, subject.sample, path, _FLOATS[precision])
            quantization = None
        else:
            quantization = self._quantise(precision, path)
        parity = self._parity(precision, path)
        return ModelFile(
            precision=precision,
            sparse=subject.sparse,
            size_bytes=path.stat().st_size,
            sha256=sha256_of_file(path),
            parity=parity,
            failures=self._failures(precision, path, parity),
            quantization=quantization,
        )

    def _quantise(self, precision: ComputePrecision, path: Path) -> Quantization:
        source = self.get("fp32")
        if source.failures:
            raise CompileError(f"it is made of the fp32 file, in which {'; '.join(source.failures)}")
        source_path, samples = self._path("fp32"), self._subject.calibration_batches(self._calibration.samples)
        if precision == "fp8":
            return quantize_fp8(source_path, samples, path)
        return find_quantization(source_path, samples, self._calibration, self._judge.verdict, path, self._tell)

    def _failures(self, precision: ComputePrecision, path: Path, parity: Parity | None) -> tuple[str, ...]:
        """Of int8 those on any engine that it was to hold on; of the others, where it was judged, on that one."""
        if precision == "int8":
            return self._judge.verdict(path).failures
        return self._judge.failures(parity, precision) if parity else ()

    def _parity(self, precision: ComputePrecision, path: Path) -> Parity | None:
        """None if nothing here runs the file, which may be of any precision but fp32."""
        try:
            return self._judge.parity(path, precision)
        except EngineError:
            if precision == "fp32":
                raise
            return None
