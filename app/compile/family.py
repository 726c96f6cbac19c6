"""What is made of one set of weights: those that were trained, or the same ones pruned."""

from collections.abc import Sequence
from pathlib import Path

from app.compile.files import ModelFile, ModelFiles, Tell
from app.compile.judge import Judge
from app.compile.opening import Opener
from app.compile.subject import Subject, pruned
from app.config import CompileConfig, EngineName


class Family:
    """A subject, the files that are made of it, what is said of them, and the engines that run them."""

    def __init__(
        self, subject: Subject, config: CompileConfig, int8_engines: Sequence[EngineName], folder: Path, tell: Tell
    ) -> None:
        """Prepare; nothing is made before it is asked for.

        Args:
            int8_engines: that int8 files are to hold the gates on, beside the oracle.
            folder: is made, and takes the files.
        """
        folder.mkdir(exist_ok=True)
        self.subject = subject
        self.judge = Judge(subject, config.gates, int8_engines)
        self.files = ModelFiles(subject, config.calibration, self.judge, folder, tell)
        self.opener = Opener(subject, self.files, config, folder)


class Families:
    """The family of a subject, and for plans, if the recipe asks for it, that of the pruned subject."""

    def __init__(
        self, subject: Subject, config: CompileConfig, int8_engines: Sequence[EngineName], folder: Path, tell: Tell
    ) -> None:
        self._config = config
        self._folder = folder
        self._tell = tell
        self._whole = Family(subject, config, int8_engines, folder, tell)
        self._pruned: Family | None = None

    @property
    def files(self) -> list[ModelFile]:
        """All that were made."""
        return [*self._whole.files.made, *(self._pruned.files.made if self._pruned else [])]

    def of(self, sparse: bool) -> Family:
        """Of whole weights, or of those of which two in four are zero; these are made when they are first asked for."""
        if not sparse:
            return self._whole
        if self._pruned is None:
            self._pruned = self._prune()
        return self._pruned

    def _prune(self) -> Family:
        subject = pruned(self._whole.subject)
        self._tell(f"pruned, two of four weights: accuracy {subject.reference.accuracy:.4f}")
        return Family(subject, self._config, (), self._folder / "sparse", self._tell)
