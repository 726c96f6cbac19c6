"""PyTorch: the module as trained, the baseline for compiled models."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import cast

import torch
from torch import nn
from torch.backends import mha

from app.engines.architecture import Device
from app.engines.base import EngineSettings, PooledEngine, Signature
from app.errors import EngineError
from app.models.factory import logits_of
from app.models.precision import TORCH_DTYPES, allow_tf32
from app.python_headers import require_python_headers
from app.tensors import Tensors


class TorchEngine(PooledEngine[nn.Module]):
    """A module, run with autocast in precisions below float32.

    The number of threads is process-wide in PyTorch: the last engine that is created sets it. TF32 is also a
    process-wide setting. It is turned off, so that float32 means float32.
    """

    name = "torch"
    version: str = torch.__version__

    def __init__(self, model: nn.Module, signature: Signature, settings: EngineSettings) -> None:
        """Move a module to its device.

        Args:
            signature: the model's arguments by name, and the name of its one output.

        Raises:
            EngineError: PyTorch does not compute in the precision, or the device is missing or too small.
        """
        if settings.precision not in TORCH_DTYPES:
            raise EngineError(f"PyTorch runs in {', '.join(TORCH_DTYPES)}: not in {settings.precision}").of(
                "precision.unsupported"
            )
        require_device(settings.device)
        self._device = torch.device("cuda" if settings.device == "gpu" else "cpu")
        self._dtype = TORCH_DTYPES[settings.precision]
        torch.set_num_threads(settings.threads)
        allow_tf32(False)
        # ``to`` returns the module itself, so all streams share its weights.
        super().__init__(signature, (model.to(self._device).eval() for _ in range(settings.streams)))

    def _run(self, member: nn.Module, inputs: Tensors) -> Tensors:
        given = {name: torch.from_numpy(tensor).to(self._device) for name, tensor in inputs.items()}
        with torch.inference_mode(), self._autocast():
            logits = logits_of(member(**given))
        (output,) = self.signature.outputs
        # NumPy has no bfloat16.
        return {output.name: logits.float().cpu().numpy()}

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device.type, self._dtype) if self._dtype != torch.float32 else nullcontext()


def require_device(device: Device) -> None:
    """Raise EngineError if PyTorch does not find a device."""
    if device == "gpu" and not torch.cuda.is_available():
        raise EngineError("PyTorch finds no GPU: choose the device cpu, or install a torch for this GPU").of(
            "gpu.missing"
        )


class CompiledTorchEngine(TorchEngine):
    """A module compiled by ``torch.compile``, for batches of any size."""

    def __init__(self, model: nn.Module, signature: Signature, settings: EngineSettings) -> None:
        """Wrap a module. The first batch compiles it.

        Raises:
            EngineError: as ``TorchEngine``, or this machine lacks Python's headers.
        """
        require_python_headers("torch.compile", EngineError)
        super().__init__(cast(nn.Module, torch.compile(model, dynamic=True)), signature, settings)

    def _run(self, member: nn.Module, inputs: Tensors) -> Tensors:
        with _FAST_PATH.avoided():
            return super()._run(member, inputs)


class _FastPath:
    """The fast path of ``nn.TransformerEncoder``, whose output has other strides than the compiler expects.

    It is a process-wide switch, so the last of several concurrent calls restores it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._calls = 0
        self._enabled = True

    @contextmanager
    def avoided(self) -> Iterator[None]:
        with self._lock:
            if self._calls == 0:
                self._enabled = mha.get_fastpath_enabled()
                mha.set_fastpath_enabled(False)
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if self._calls == 0:
                    mha.set_fastpath_enabled(self._enabled)


_FAST_PATH = _FastPath()
