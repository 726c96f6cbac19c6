"""Parts of parameters on a disk, as DeepSpeed asks for them."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

from app.errors import TrainingError
from app.training.engine.parameter_swapper import ParameterSwapper

NOT_USED = {"swap_into_buffer", "get_path", "reserve_available_buffers", "release_reserved_buffers"}
"""Methods that DeepSpeed calls only for parameters in memory (``max_in_cpu``) and for ``fast_init``."""
LARGE = 2**19
"""Elements of 2 bytes that make 1 MiB."""


class Disk:
    """A handle that keeps the files in memory."""

    def __init__(self) -> None:
        self.files: dict[str, Tensor] = {}
        self.allocated, self.is_full = 0, False

    def get_intra_op_parallelism(self) -> int:
        return 1

    def new_cpu_locked_tensor(self, size: int, like: Tensor) -> Tensor:
        self.allocated += 1
        return torch.full((size,), torch.nan, dtype=like.dtype)

    def async_pwrite(self, buffer: Tensor, file: str, offset: int) -> None:
        self.files[file] = buffer.clone()

    def async_pread(self, buffer: Tensor, file: str, offset: int) -> None:
        buffer.copy_(self.files[file])

    def wait(self) -> int:
        return 0 if self.is_full else 1


def parameter(number: int, numel: int) -> Any:
    part = torch.empty(0, dtype=torch.bfloat16)
    part.ds_numel = numel  # type: ignore[attr-defined]
    return SimpleNamespace(ds_id=number, dtype=torch.bfloat16, ds_tensor=part)


def test_it_has_all_that_deepspeed_calls() -> None:
    folder = Path(deepspeed.__file__).parent / "runtime/zero"
    source = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    called = set(re.findall(r"(?:nvme_swapper|param_swapper)\.(\w+)\(", source))
    assert called == {name for name in vars(ParameterSwapper) if not name.startswith("_")} | NOT_USED


def test_parts_come_back_and_buffers_are_used_again(tmp_path: Path) -> None:
    disk = Disk()
    swapper = ParameterSwapper(tmp_path / "parts", disk, torch.bfloat16)
    assert not swapper.swappable_tensor(numel=LARGE - 1)
    assert swapper.swappable_tensor(numel=LARGE)
    parameters = [parameter(number, LARGE + 1) for number in range(9)]
    for each in parameters:
        swapper.get_buffer(each, LARGE + 1).fill_(each.ds_id)
        swapper.swap_out_and_release([each])
    assert disk.allocated == 1, "each part left memory before the next came"
    swapper.swap_in(parameters[3:5])
    assert [each.ds_tensor.unique().tolist() for each in parameters[3:5]] == [[3.0], [4.0]]
    assert disk.allocated == 2, "two are in memory at once"
    swapper.remove_partition_and_release_buffers(parameters[3:5])
    assert parameters[3].ds_tensor.numel() == 0
    swapper.swap_out_partitioned_params(parameters[3:4], [torch.full((LARGE + 1,), 7.0)])
    swapper.swap_in(parameters[3:4])
    assert parameters[3].ds_tensor.unique().tolist() == [7.0]
    assert disk.allocated == 2


def test_a_full_disk_ends_training(tmp_path: Path) -> None:
    disk = Disk()
    swapper, part = ParameterSwapper(tmp_path, disk, torch.bfloat16), parameter(0, LARGE)
    swapper.get_buffer(part, LARGE)
    disk.is_full = True
    with pytest.raises(TrainingError, match=r"train\.plan\.nvme_path is full"):
        swapper.swap_out_and_release([part])
