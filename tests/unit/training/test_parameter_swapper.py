"""Parts of parameters on a disk, as DeepSpeed asks for them."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

from app.training.engine.parameter_swapper import ParameterSwapper

NOT_USED = {"swap_into_buffer", "get_path", "reserve_available_buffers", "release_reserved_buffers"}
"""Methods that DeepSpeed calls only for parameters in memory (``max_in_cpu``) and for ``fast_init``."""
LARGE = 2**19
"""Elements of 2 bytes that make 1 MiB."""


class Disk:
    """A handle that keeps the files in memory."""

    def __init__(self) -> None:
        self.files: dict[str, Tensor] = {}
        self.allocated = 0

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
        return 1


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


HANDLE = """
import resource, sys
from pathlib import Path
import torch
from deepspeed.runtime.swap_tensor.utils import swap_out_tensors
from app.errors import TrainingError
from app.training.engine.deepspeed_internals import file_handle
from app.training.engine.nvme import load_asynchronous_io
from app.training.engine.parameter_swapper import ParameterSwapper
from tests.unit.training.test_parameter_swapper import parameter

load_asynchronous_io()
handle, folder, large = file_handle({}), Path(sys.argv[1]), 2**21
buffers = [handle.new_cpu_locked_tensor(size, torch.empty(0)) for size in (2**18, 2**20)]
swapper, part = ParameterSwapper(folder, handle, torch.bfloat16), parameter(0, large)
"""
"""A real handle, a swapper with a part of 4 MiB, and buffers of 1 and 4 MiB, for a process that may be aborted."""
LIMITED = "resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, 2**21))"


@pytest.mark.slow  # DeepSpeed compiles its handle for minutes
@pytest.mark.debian("libaio-dev")  # against this package
@pytest.mark.parametrize(
    ("prepared", "fails", "said"),
    [
        (
            f"swapper.get_buffer(part, large); {LIMITED}",
            "swapper.swap_out_and_release([part])",
            "4,194,304 bytes cannot be written to '{}/0.swp' (File too large)",
        ),
        (
            LIMITED,
            "swap_out_tensors(handle, buffers, [f'{folder}/small', f'{folder}/large'])",
            "4,194,304 bytes cannot be written to '{}/large' (File too large)",
        ),
        (
            "swapper.get_buffer(part, large).fill_(3); swapper.swap_out_and_release([part]); swapper.swap_in([part]); "
            "assert part.ds_tensor.unique().tolist() == [3]; swapper.remove_partition_and_release_buffers([part]); "
            "(folder / '0.swp').open('r+b').truncate(2**21)",
            "swapper.swap_in([part])",
            "4,194,304 bytes cannot be read from '{}/0.swp' (it has 2,097,152)",
        ),
    ],
    ids=["full under a parameter", "full under a second tensor", "shortened"],
)
def test_a_failed_file_ends_training_with_an_error(prepared: str, fails: str, said: str, tmp_path: Path) -> None:
    """DeepSpeed's own handle counts writes that were cut short as completed, and aborts when it reads such a file."""
    script = f"{HANDLE}\n{prepared}\ntry:\n    {fails}\nexcept TrainingError as error:\n    print(error)\n"
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert said.format(tmp_path) in done.stdout
