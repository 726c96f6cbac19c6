"""Evaluate ONNX files by the gates, as the reference runtime runs them and as the engine for this CPU does.

The reference runtime is ONNX Runtime on the CPU, which runs quantized files node by node (``open_oracle``).
"""

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from app.checksums import sha256_of_file
from app.compile.parity import Parity, check_signature, compare, failures
from app.compile.quantization.search import Verdict
from app.compile.source import Source
from app.config import ComputePrecision, EngineName, GatesConfig
from app.engines.base import Engine, EngineSettings
from app.engines.onnxruntime import OnnxRuntimeEngine, open_oracle
from app.engines.registry import open_engine
from app.errors import CompileError, EngineError


class Evaluator:
    """Compares files with PyTorch on the whole validation split. Results are cached by the file's sha256."""

    def __init__(self, source_model: Source, gates: GatesConfig, engines: Sequence[EngineName]) -> None:
        """Evaluate nothing yet.

        Args:
            engines: engines on which int8 files have to pass the gates as well. Each opens ONNX files.
        """
        self._source_model = source_model
        self._gates = gates
        self._engines = engines
        self._parities: dict[str, Parity] = {}
        self._verdicts: dict[str, Verdict] = {}

    def parity(self, path: Path, precision: ComputePrecision) -> Parity:
        """Compare the file with PyTorch, on the reference runtime or for bf16 on OpenVINO.

        The reference runtime has no bf16 kernels for CPUs.

        Raises:
            CompileError: the file has other inputs or outputs than the source model.
            EngineError: this machine cannot run the file.
        """
        content = sha256_of_file(path)
        if content not in self._parities:
            self._parities[content] = self._compare(self._open(path, precision), path)
        return self._parities[content]

    def failures(self, parity: Parity, precision: ComputePrecision) -> tuple[str, ...]:
        """Return a sentence for each failed gate."""
        source = self._source_model
        # The score to keep of a pruned model is that of the whole one, which is compared with nothing.
        is_compared = source.score_to_keep == source.reference.score
        return failures(parity, precision, source.score_to_keep, source.reference.judge, self._gates, is_compared)

    def leave_out_engines(self, fp32: Path) -> None:
        """Evaluate int8 files no more on engines that do not even run the float32 file. They get no variant."""
        self._engines = [name for name in self._engines if self._runs(name, fp32)]

    def _runs(self, name: EngineName, path: Path) -> bool:
        try:
            with closing(open_engine(name, path, EngineSettings("fp32", self._source_model.threads))) as engine:
                check_signature(engine.signature, self._source_model.signature, path)
        except (CompileError, EngineError):
            return False
        return True

    def verdict(self, path: Path) -> Verdict:
        """Evaluate an int8 file on all engines. Its failures are those of any engine, its loss is the largest.

        The engines differ: without VNNI, sums of int8 products saturate, and OpenVINO fuses nodes that the reference
        runtime runs one by one.
        """
        content = sha256_of_file(path)
        # Keyed by content: the file that the search chose is evaluated again under its final name.
        if content not in self._verdicts:
            self._verdicts[content] = self._verdict(path)
        return self._verdicts[content]

    def _verdict(self, path: Path) -> Verdict:
        settings = EngineSettings("int8", self._source_model.threads)
        try:
            reference = self.parity(path, "int8")
            others = {name: self._compare(open_engine(name, path, settings), path) for name in self._engines}
        except EngineError as error:  # the file fails if one engine cannot run it
            return Verdict((str(error),), math.inf)
        by_engine = [
            f"as {name} runs it, {failure}"
            for name, parity in others.items()
            for failure in self.failures(parity, "int8")
        ]
        # The worst engine counts, because any of them may run the file.
        loss = max(map(self._loss, (reference, *others.values())))
        return Verdict((*self.failures(reference, "int8"), *by_engine), loss)

    def _open(self, path: Path, precision: ComputePrecision) -> Engine:
        if precision == "bf16":
            return open_engine("openvino", path, EngineSettings("bf16", self._source_model.threads))
        if precision == "fp32":
            # As it is served: an imported file may be quantized already.
            return OnnxRuntimeEngine(path, EngineSettings(threads=self._source_model.threads))
        return open_oracle(path, self._source_model.threads)

    def _compare(self, engine: Engine, path: Path) -> Parity:
        with closing(engine):
            check_signature(engine.signature, self._source_model.signature, path)
            return compare(engine, self._source_model.reference)

    def _loss(self, parity: Parity) -> float:
        """Return the score's drop, differing rows, lost cosine and relative error, added up; infinite for a NaN."""
        to_keep, kept = self._source_model.score_to_keep, parity.score
        drop = max(0.0, self._source_model.reference.judge.drop(to_keep, kept)) if to_keep and kept else 0.0
        # Terms of different kinds, each 0 for a perfect file: enough to rank files.
        loss = drop + parity.differing_rows + 1.0 - parity.cosine + parity.relative_error
        return loss if math.isfinite(loss) else math.inf
