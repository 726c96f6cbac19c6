"""A torch.export program that would run code on reading is refused, and its code does not run."""

import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.importing import EXACT, imported

Parts = dict[str, bytes]
SAMPLE, PROGRAM = "data/sample_inputs/model.pt", "models/model.json"


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def saved(value: object) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


def in_sample(parts: Parts, mark: Path) -> Parts:
    return parts | {SAMPLE: saved(Payload(mark))}


def in_weights(parts: Parts, mark: Path) -> Parts:
    name = "data/weights/model_weights_config.json"
    config = json.loads(parts[name])
    weight = next(iter(config["config"].values()))
    weight["use_pickle"] = True
    return parts | {name: json.dumps(config).encode(), f"data/weights/{weight['path_name']}": saved(Payload(mark))}


def in_constants(parts: Parts, mark: Path) -> Parts:
    name = "data/constants/model_constants_config.json"
    config = {"config": {"c": {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True}}}
    body = {"data/constants/opaque_obj_0": pickle.dumps(Payload(mark))}
    return parts | body | {name: json.dumps(config).encode()}


def in_library(parts: Parts, mark: Path) -> Parts:
    return parts | {"data/aotinductor/model/model.so": str(mark).encode()}


def in_json(pattern: str, code: str) -> Callable[[Parts, Path], Parts]:
    """Replace the program's strings that match with code."""

    def change(parts: Parts, mark: Path) -> Parts:
        text = json.dumps(code.replace("MARK", str(mark)))[1:-1]
        changed, count = re.subn(pattern, lambda _: text, parts[PROGRAM].decode())
        assert count
        return parts | {PROGRAM: changed.encode()}

    return change


def in_state_name(code: str) -> Callable[[Parts, Path], Parts]:
    """Replace the name of a parameter with code, in the program and in the list of weights."""

    def change(parts: Parts, mark: Path) -> Parts:
        text = json.dumps(code.replace("MARK", str(mark)))[1:-1].encode()
        names = (PROGRAM, "data/weights/model_weights_config.json")
        return parts | {name: parts[name].replace(b'"layer.weight"', b'"' + text + b'"') for name in names}

    return change


CALL = "__import__('os').system('touch MARK')"
CALL_WITHOUT_DOTS = "getattr(__import__('os'), 'system')('touch MARK')"
ATTACKS: dict[str, Callable[[Parts, Path], Parts]] = {
    "pickled sample": in_sample,
    "pickled weight": in_weights,
    "pickled object": in_constants,
    "compiled library": in_library,
    "expression": in_json(r"Symbol\('s\d+', positive=True, integer=True\)", CALL),
    "guard": in_json(r"L\['\w+'\]\.size\(\)\[0\] == L\['\w+'\]\.size\(\)\[0\]", CALL),
    "name of an input": in_json(r'(?<=")x(?=")', f"x={CALL}"),
    "name of a parameter": in_state_name(f'weight", {CALL_WITHOUT_DOTS}) or getattr(self, "weight'),
    "name with an escape": in_state_name("weight\\"),
    "name with a line": in_state_name("weight\n"),
    "name with a return": in_state_name("weight\r"),
    "name of an argument": in_json(r'mask(?=\\+")', "mask-ed"),
    "operator": in_json(r"torch\.ops\.aten\.mul\.Tensor", "torch.os.system"),
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Parts]:
    """The archive's root, and the records of a good program by name."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = self.layer(x) * mask
            return scaled

    path, rows = tmp_path_factory.mktemp("program") / "m.pt2", torch.export.Dim("rows")
    shapes = {"x": {0: rows}, "mask": {0: rows}}
    torch.export.save(
        torch.export.export(Model(), (torch.ones(2, 3),), {"mask": torch.ones(2, 1)}, dynamic_shapes=shapes), path
    )
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].partition("/")[0]
        return root, {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write_program(path: Path, root: str, parts: Mapping[str, Any]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in parts.items():
            archive.writestr(f"{root}/{name}", content)
    return path


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_in_a_program_is_refused_and_not_run(attack: str, parts: tuple[str, Parts], tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = write_program(tmp_path / "m.pt2", parts[0], ATTACKS[attack](parts[1], mark))
    refused = imported(tmp_path, "program", path, *EXACT, succeeds=False)
    assert not mark.exists()
    assert "run code when it is read" in refused or "Weights only load failed" in refused, refused
    assert not (tmp_path / "models").exists()


def test_names_of_parameters_that_are_no_identifiers_are_imported(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleDict({"user-id": torch.nn.Linear(3, 4), "a b/c:d+": torch.nn.BatchNorm1d(4)})
            self.register_buffer("not-kept", torch.ones(4), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = self.parts["a b/c:d+"](self.parts["user-id"](x)) * getattr(self, "not-kept")
            return scaled

    path, shapes = tmp_path / "m.pt2", {"x": {0: torch.export.Dim("rows")}}
    torch.export.save(torch.export.export(Model().eval(), (torch.ones(2, 3),), dynamic_shapes=shapes), path)
    assert "program" in imported(tmp_path, "program", path, *EXACT)


def test_the_same_program_without_code_is_imported(parts: tuple[str, Parts], tmp_path: Path) -> None:
    path = write_program(tmp_path / "m.pt2", parts[0], parts[1])
    assert "program" in imported(tmp_path, "program", path, *EXACT)
