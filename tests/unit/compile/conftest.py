"""Shared by the tests of compile."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry
from upath import UPath

from app.compile.generation import compilation
from tests.compiling import digits_in, train_digits
from tests.quantizing import SUBJECTS, Subject


@pytest.fixture(autouse=True, scope="package")
def _one_table() -> Iterator[None]:
    """Build the exporter's table of operators once. It builds it for each export, which takes half a second."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture(autouse=True, scope="package")
def _one_setting() -> Iterator[None]:
    """Time language models in one setting, because each replica of another one is a process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(compilation._SETTINGS, "cpu", 1)
        yield


@pytest.fixture(scope="package")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    """Storage with a model that was trained on the digits."""
    return train_digits(tmp_path_factory.mktemp("storage"))


@pytest.fixture(scope="package")
def weights(storage: UPath) -> UPath:
    """The weights of that model."""
    return digits_in(storage)


@pytest.fixture(scope="package")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """Return a model that is quantized, by its name. It is made and exported once. Do not change it."""

    @cache
    def make(name: str) -> Subject:
        torch.manual_seed(0)
        return SUBJECTS[name](tmp_path_factory.mktemp(name))

    return make
