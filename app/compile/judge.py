"""Whether an ONNX file holds the gates: as the oracle runs it, and as the engine for this CPU does."""

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from app.checksums import sha256_of_file
from app.compile.parity import Parity, check_signature, compare, failures
from app.compile.quantization.search import Verdict
from app.compile.subject import Subject
from app.config import ComputePrecision, EngineName, GatesConfig
from app.engines.base import Engine, EngineSettings
from app.engines.onnxruntime import open_oracle
from app.engines.registry import open_engine
from app.errors import EngineError


class Judge:
    """Compares files with PyTorch on the whole validation split; one that was judged is not run again."""

    def __init__(self, subject: Subject, gates: GatesConfig, engines: Sequence[EngineName]) -> None:
        """Prepare.

        Args:
            engines: that int8 files are to hold the gates on as well; each opens ONNX files.
        """
        self._subject = subject
        self._gates = gates
        self._engines = engines
        self._seen: dict[str, Parity] = {}
        self._verdicts: dict[str, Verdict] = {}

    def parity(self, path: Path, precision: ComputePrecision) -> Parity:
        """How the oracle answers, or in bf16, for which it has no kernels on CPUs, OpenVINO.

        Raises:
            CompileError: the file takes or gives other tensors than the subject.
            EngineError: it does not run here.
        """
        content = sha256_of_file(path)
        if content not in self._seen:
            self._seen[content] = self._compare(self._open(path, precision), path)
        return self._seen[content]

    def failures(self, parity: Parity, precision: ComputePrecision) -> tuple[str, ...]:
        """The gates that do not hold."""
        return failures(parity, precision, self._subject.accuracy_to_keep, self._gates)

    def verdict(self, path: Path) -> Verdict:
        """Of an int8 file, the worst that any says; lost rows and turned logits count alike.

        A file can be right and an engine wrong: without VNNI sums saturate, and OpenVINO fuses what the oracle runs
        node by node.
        """
        content = sha256_of_file(path)
        if content not in self._verdicts:
            self._verdicts[content] = self._verdict(path)
        return self._verdicts[content]

    def _verdict(self, path: Path) -> Verdict:
        settings = EngineSettings("int8", self._subject.threads)
        try:
            oracles = self.parity(path, "int8")
            others = {name: self._compare(open_engine(name, path, settings), path) for name in self._engines}
        except EngineError as error:  # a file that one of them cannot run is none for it
            return Verdict((str(error),), math.inf)
        by_engine = [
            f"as {name} runs it, {each}" for name, parity in others.items() for each in self.failures(parity, "int8")
        ]
        return Verdict((*self.failures(oracles, "int8"), *by_engine), max(map(self._loss, (oracles, *others.values()))))

    def _open(self, path: Path, precision: ComputePrecision) -> Engine:
        if precision == "bf16":
            return open_engine("openvino", path, EngineSettings("bf16", self._subject.threads))
        return open_oracle(path, self._subject.threads)

    def _compare(self, engine: Engine, path: Path) -> Parity:
        with closing(engine):
            check_signature(engine.signature, self._subject.signature, path)
            return compare(engine, self._subject.reference)

    def _loss(self, parity: Parity) -> float:
        loss = max(0.0, self._subject.accuracy_to_keep - parity.accuracy) + 1.0 - parity.cosine
        return loss if math.isfinite(loss) else math.inf
