"""Engines by name. The library of an engine is imported when the engine is opened."""

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from app.config import PLAN_ENGINES, EngineName
from app.engines.architecture import Device
from app.engines.base import Engine, EngineSettings
from app.engines.tensorrt.library import EXTRAS
from app.errors import EngineError
from app.import_string import did_you_mean


@dataclass(frozen=True)
class _Entry:
    """An engine's class, its devices, the packages of which it needs one, and our extra that installs them."""

    module: str
    class_name: str
    packages: tuple[str, ...]
    devices: tuple[Device, ...]
    extra: str | None = None

    @property
    def installed(self) -> bool:
        # Importing the libraries would take seconds.
        return any(importlib.util.find_spec(package) for package in self.packages)

    def open(self, path: Path, settings: EngineSettings) -> Engine:
        engine: Engine = getattr(importlib.import_module(self.module), self.class_name)(path, settings)
        return engine


_ENGINES: dict[str, _Entry] = {
    "openvino": _Entry("app.engines.openvino", "OpenVinoEngine", ("openvino",), ("cpu",)),
    "onnxruntime": _Entry("app.engines.onnxruntime", "OnnxRuntimeEngine", ("onnxruntime",), ("cpu", "gpu")),
    "tensorrt": _Entry("app.engines.tensorrt.engine", "TensorRtEngine", ("tensorrt",), ("gpu",), EXTRAS["tensorrt"]),
    "tensorrt_rtx": _Entry(
        "app.engines.tensorrt.engine",
        "TensorRtRtxEngine",
        ("tensorrt_rtx", "tensorrt_rtx_bindings"),
        ("gpu",),
        EXTRAS["tensorrt_rtx"],
    ),
    "torch": _Entry("app.engines.torch", "TorchEngine", ("torch",), ("cpu", "gpu")),
}


def installed_engines() -> tuple[str, ...]:
    """Return the engines whose library is installed. Whether its device exists shows only when an engine is opened."""
    return tuple(name for name, entry in _ENGINES.items() if entry.installed)


def runs_plans(engine: EngineName) -> bool:
    """Return whether an engine runs TensorRT plans, which are built for one GPU and for certain sizes."""
    return engine in PLAN_ENGINES


def runs_module(engine: EngineName) -> bool:
    """Return whether an engine runs the trained module itself, not a plan or an ONNX file."""
    return engine == "torch"


def devices_of(engine: EngineName) -> tuple[Device, ...]:
    """Return the devices that an engine can run on."""
    return _ENGINES[engine].devices


def require_installed(name: str) -> None:
    """Raise EngineError, with the command to install it, if the library of an engine is missing."""
    if name not in _ENGINES:
        raise EngineError(f"no engine is called {name!r}; {did_you_mean(name, list(_ENGINES))}").of("engine.unknown")
    if not (entry := _ENGINES[name]).installed:
        package = f".[{entry.extra}]" if entry.extra else "."
        raise EngineError(
            f"the engine {name} is not installed, only {', '.join(installed_engines())}: "
            f"pip install '{package}' in the checkout"
        ).of("engine.not_installed")


def open_engine(name: str, path: Path, settings: EngineSettings | None = None) -> Engine:
    """Load a compiled model: an ONNX file, or a TensorRT plan with its manifest beside it.

    Raises:
        EngineError: no engine has this name, its library is not installed, or it cannot load the file.
    """
    require_installed(name)
    if name == "torch":
        raise EngineError("the engine torch runs a module, not a file: make an app.engines.torch.TorchEngine of it").of(
            "torch.no_file"
        )
    return _ENGINES[name].open(path, settings or EngineSettings())
