"""From a variant to an engine that runs it."""

import copy
from pathlib import Path
from typing import cast

from app.compile.files import ModelFiles
from app.compile.subject import Subject
from app.compile.sweep import Concurrency
from app.compile.variants import BUILT_AHEAD, Variant
from app.config import CompileConfig, ComputePrecision
from app.engines.base import Engine, EngineSettings
from app.engines.registry import open_engine, runs_plans
from app.engines.tensorrt.build import build_plan
from app.engines.tensorrt.library import Flavour
from app.engines.tensorrt.manifest import BuildSettings
from app.engines.torch import TorchEngine
from app.repository.manifest import PLAN_FILE


class Opener:
    """Opens variants of a subject; TensorRT's plans are built when they are first asked for."""

    def __init__(self, subject: Subject, files: ModelFiles, config: CompileConfig, folder: Path) -> None:
        self._subject = subject
        self._files = files
        self._config = config
        self._folder = folder

    def open(self, variant: Variant, concurrency: Concurrency) -> Engine:
        """The engine, which the caller closes.

        Raises:
            CompileError: the variant's file or plan cannot be made.
            EngineError: the engine refuses it on this machine.
        """
        settings = EngineSettings(variant.precision, concurrency.threads, concurrency.streams, variant.device)
        if variant.runs_module:
            model = copy.deepcopy(self._subject.trained.model)  # the engine moves it to its device
            return TorchEngine(model, self._subject.signature, settings)
        return open_engine(variant.engine, self.path(variant), settings)

    def path(self, variant: Variant) -> Path:
        """What the engine of a variant opens: an ONNX file, or for TensorRT a plan."""
        if runs_plans(variant.engine):
            return self._plan(cast(Flavour, variant.engine), variant.precision, ())
        return self._files.path(variant.file)

    def build_ahead(self, precision: ComputePrecision) -> Path:
        """The folder of a plan for ``compile.targets``, which nothing here runs, with its manifest."""
        return self._plan(BUILT_AHEAD, precision, tuple(self._config.targets)).parent

    def _plan(self, flavour: Flavour, precision: ComputePrecision, targets: tuple[str, ...]) -> Path:
        place = "-".join((flavour, precision, *targets))
        plan = self._folder / place / PLAN_FILE
        if not plan.exists():
            file = self._files.path(precision)
            settings = BuildSettings(
                precision=precision,
                profile=self._subject.profile(self._config.batch_sizes),
                sparse_weights=self._subject.sparse,
                workspace_mb=self._config.workspace_mb,
            )
            plan.parent.mkdir(exist_ok=True)
            build_plan(flavour, file, plan, settings, targets)
        return plan
