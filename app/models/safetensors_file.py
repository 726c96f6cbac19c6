"""Write safetensors files one tensor at a time; the safetensors library needs all tensors in memory."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8


@dataclass(frozen=True)
class Form:
    """Type and shape of a tensor, as the header lists them."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(path: Path, forms: Mapping[str, Form], read: Callable[[str], Tensor]) -> None:
    """Write the tensors that ``forms`` lists. ``read`` is called once for each name and returns a tensor of its form.

    Tensors of a type are read and written in the order of ``forms``.

    Format: https://huggingface.co/docs/safetensors/index#format
    """
    # This order keeps each tensor aligned.
    names = sorted(forms, key=lambda name: -forms[name].dtype.itemsize)
    # transformers requires the format.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        form = forms[name]
        place = [offset, offset + form.nbytes]
        header[name] = {"dtype": _TYPES[form.dtype], "shape": list(form.shape), "data_offsets": place}
        offset = place[1]

    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            tensor = read(name)
            if (tensor.dtype, tuple(tensor.shape)) != (forms[name].dtype, forms[name].shape):
                raise ValueError(f"{name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}: expected {forms[name]}")
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
