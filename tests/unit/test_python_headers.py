"""A machine without Python's headers: whoever compiles against them is refused in one sentence."""

import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from app.config import TrainConfig
from app.engines.base import EngineSettings
from app.engines.torch import CompiledTorchEngine
from app.errors import EngineError, RayloomError, TrainingError
from app.training.engine.extensions import load_extension
from app.training.worker import start_worker
from tests.engine_contract import SIGNATURE, encoder, rows


class CpuAdam:
    """An extension with the header that DeepSpeed's have."""

    name = "cpu_adam"

    def load(self) -> None:
        cpp_extension.load_inline(self.name, "#include <torch/extension.h>\n")


COMPILING: dict[str, tuple[Callable[[], object], type[RayloomError]]] = {
    "torch.compile": (lambda: CompiledTorchEngine(encoder(), SIGNATURE, EngineSettings()).infer(rows(3)), EngineError),
    "train.torch_compile": (lambda: start_worker(TrainConfig(torch_compile=True)), TrainingError),
    "DeepSpeed's cpu_adam": (lambda: load_extension(CpuAdam()), TrainingError),
}


@pytest.mark.parametrize("what", COMPILING)
def test_what_needs_pythons_headers_names_debians_package(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sysconfig.get_path
    monkeypatch.setattr(
        sysconfig,
        "get_path",
        lambda name, *given, **named: str(tmp_path) if name == "include" else real(name, *given, **named),
    )
    for name in ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    compile_it, error = COMPILING[what]
    with pytest.raises(
        error, match=rf"^{what} compiles C\+\+ against Python\.h, which '{tmp_path}' lacks: .*python3-dev$"
    ):
        compile_it()
