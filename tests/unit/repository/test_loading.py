"""A published version in memory: opened as its key says, on this machine or on none."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from upath import UPath

from app.engines import architecture
from app.engines.architecture import architecture_of
from app.engines.base import Engine, EngineSettings, ShapeProfile
from app.engines.registry import open_engine
from app.errors import EngineError
from app.published.engine import open_published
from app.published.loaded import load_model
from app.repository.known_answers import KnownAnswers
from app.repository.manifest import Quantization
from app.repository.repository import Repository
from app.serving.batching.scheduler import BatchingPolicy, RowsByLength
from app.tensors import OUTPUT, Tensor, Tensors
from tests.engine_contract import TEXTS, encoder, exported, rows
from tests.helpers import ROOT
from tests.loading import answers_rightly, load_encoder, model_card, publish_encoder
from tests.wording import refused

X86 = platform.machine() == "x86_64"
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(UPath(tmp_path / "storage"))


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_version_is_opened_with_the_engine_of_its_key(engine: str, repository: Repository, tmp_path: Path) -> None:
    publish_encoder(repository, tmp_path, model_card(engine=engine))
    model = load_encoder(tmp_path)
    assert (model.engine.name, model.platform) == (engine, f"{engine}_onnx")
    assert answers_rightly(model, tmp_path)
    (texts,) = model.encode(TEXTS[:2])
    prediction, _ = model.decode(model.engine.infer(texts.tensors))
    assert sum(prediction.scores.values()) == pytest.approx(1.0, abs=1e-5)
    assert prediction.scores[prediction.label] == max(prediction.scores.values())


@pytest.mark.parametrize(
    ("by_length", "full"),
    [(None, [(4, 32)]), (RowsByLength("input_ids", 1, ((8, 4), (16, 2), (32, 1))), [(4, 8), (2, 16), (1, 32)])],
)
def test_a_version_has_run_a_row_and_a_full_batch_of_every_length_before_it_is_asked(
    by_length: RowsByLength | None,
    full: list[tuple[int, int]],
    repository: Repository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[int, ...]] = []

    def opened(*arguments: Any) -> Engine:
        engine = open_published(*arguments)
        infer = engine.infer

        def noted(inputs: Tensors) -> Tensors:
            ran.append(inputs["input_ids"].shape)
            return infer(inputs)

        monkeypatch.setattr(engine, "infer", noted)
        return engine

    publish_encoder(repository, tmp_path, model_card(profile=ShapeProfile(batch_sizes=(1,), lengths=(8, 16, 32))))
    full_batches = BatchingPolicy(max_batch_size=4, by_length=by_length).full_batches
    load_model(UPath(tmp_path / "storage"), "toy", 1, 1, full_batches, open_engine=opened)
    assert ran == [(1, 8), (1, 16), (1, 32), *full]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_its_precision_is_that_of_its_key_or_it_is_refused(
    precision: str, repository: Repository, tmp_path: Path
) -> None:
    publish_encoder(repository, tmp_path, model_card(engine="openvino", precision=precision))
    if precision.upper() in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        settings = EngineSettings(precision=precision)
        expected = open_engine("openvino", tmp_path / "files/model.onnx", settings).infer(rows(3))[OUTPUT]
        assert np.array_equal(load_encoder(tmp_path).engine.infer(rows(3))[OUTPUT], expected)
        assert not answers_rightly(load_encoder(tmp_path), tmp_path)
    else:
        with pytest.raises(
            EngineError, match=f"compiled for openvino of another day, {precision}.*does not compute in"
        ):
            load_encoder(tmp_path)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("is_changed", [False, True])
def test_another_version_of_an_engine_serves_what_rounds_if_it_gives_the_known_answers(
    precision: str, is_changed: bool, repository: Repository, tmp_path: Path
) -> None:
    right_logits = encoder()(**{name: torch.from_numpy(array) for name, array in rows(3).items()}).detach().numpy()
    given = {OUTPUT: right_logits + (0.1 if is_changed else 0.0)}
    known = KnownAnswers(rows(3), given, {OUTPUT: np.ones((1, 3))})
    publish_encoder(
        repository,
        tmp_path,
        model_card(precision=precision).model_copy(update={"scaled_difference": 0.01}),
        known=known,
    )
    if is_changed and precision != "fp32":
        with pytest.raises(EngineError, match=r"up to 1\.0e-01 of their magnitude from PyTorch's, and were 1\.0e-02"):
            load_encoder(tmp_path)
    else:
        assert answers_rightly(load_encoder(tmp_path), tmp_path)


@pytest.mark.skipif(not X86, reason="needs an x86 CPU, which oneDNN can be told to use less of")
def test_a_precision_that_this_cpu_lacks_is_refused_with_the_key(repository: Repository, tmp_path: Path) -> None:
    publish_encoder(repository, tmp_path, model_card(engine="openvino", precision="fp16"))
    code = (
        "import sys; from upath import UPath; from app.published.loaded import load_model;"
        "load_model(UPath(sys.argv[1]), 'toy', 1, threads=1)"
    )
    old_cpu = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", code, str(tmp_path / "storage")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=old_cpu, cwd=ROOT)
    assert "was compiled for openvino of another day, fp16, on cpu x86_64: this CPU" in done.stderr
    assert "does not compute in fp16: OpenVINO finds" in done.stderr


def test_another_version_of_the_library_compiles_it_anew_and_says_so(
    repository: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish_encoder(repository, tmp_path, model_card())
    model = load_encoder(tmp_path)
    assert f"was checked with onnxruntime of another day, fp32, on cpu {platform.machine()}" in caplog.text
    assert f"{model.engine.version} compiled it again" in caplog.text


@pytest.mark.parametrize(
    "elsewhere",
    [{"architecture": "riscv64"}, pytest.param({"device": "gpu", "architecture": "SM90"}, marks=WITHOUT_GPU)],
)
def test_in_float32_another_machine_compiles_it_anew_and_says_so(
    elsewhere: dict[str, str], repository: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish_encoder(repository, tmp_path, model_card(**elsewhere))
    assert answers_rightly(load_encoder(tmp_path), tmp_path)
    assert f"on {elsewhere.get('device', 'cpu')} {elsewhere['architecture']}; compiled again for" in caplog.text
    assert f"this machine, cpu {platform.machine()}" in caplog.text


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (
            {"engine": "openvino", "precision": "bf16", "architecture": "riscv64"},
            f"bf16, on cpu riscv64: this machine is cpu {platform.machine()}, where bf16 gives other numbers",
        ),
        pytest.param(
            {"precision": "fp16", "device": "gpu", "architecture": "SM90"},
            "fp16, on gpu SM90: this machine has no GPU",
            marks=WITHOUT_GPU,
        ),
    ],
)
def test_where_the_numbers_would_be_others_it_is_refused(
    key: dict[str, str], words: str, repository: Repository, tmp_path: Path
) -> None:
    publish_encoder(repository, tmp_path, model_card(**key))
    with pytest.raises(EngineError) as refused:
        load_encoder(tmp_path)
    assert str(refused.value).startswith(f"model 'toy', version 1, was compiled for {key.get('engine', 'onnxruntime')}")
    assert words in str(refused.value)


@pytest.mark.skipif(not X86, reason="needs an x86 CPU")
@pytest.mark.parametrize(("judged", "here"), [("with", "without"), ("without", "with")])
def test_int8_that_was_judged_with_vnni_is_not_run_without_nor_the_other_way_round(
    judged: str, here: str, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = {"with": "flags\t\t: fpu avx512f avx512_vnni\n", "without": "flags\t\t: fpu avx2\n"}
    (tmp_path / "cpuinfo").write_text("model name\t: one\n" + cpus[here], encoding="utf-8")
    monkeypatch.setattr(architecture, "_CPU_INFO", tmp_path / "cpuinfo")
    publish_encoder(repository, tmp_path, model_card(precision="int8", architecture=f"x86_64 {judged} VNNI"))
    with pytest.raises(EngineError) as refused:
        load_encoder(tmp_path)
    assert f"int8, on cpu x86_64 {judged} VNNI: this machine is cpu x86_64 {here} VNNI" in str(refused.value)
    assert "run jobs.compile on a machine like this one" in str(refused.value)


@pytest.mark.skipif(not X86, reason="needs an x86 CPU")
@pytest.mark.parametrize(
    ("flags", "has"),
    [
        ("flags : fpu avx_vnni", True),
        ("flags : avx512_vnni", True),
        ("flags : avx512f avx2", False),
        ("", False),
    ],
)
def test_a_cpu_has_vnni_if_the_kernel_lists_it(
    flags: str, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "_CPU_INFO", tmp_path / "cpuinfo")
    assert architecture_of("cpu", "int8") == "x86_64 without VNNI", "nothing is listed"
    (tmp_path / "cpuinfo").write_text(flags, encoding="utf-8")
    assert architecture_of("cpu", "int8") == f"x86_64 {'with' if has else 'without'} VNNI"
    assert architecture_of("cpu", "fp32") == "x86_64"


def test_a_file_that_was_no_model_when_it_was_published_is_refused(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/model.onnx").write_bytes(exported()[:1000])
    manifest = repository.publish("toy", UPath(tmp_path / "other"), model_card())
    with pytest.raises(EngineError, match=r"version 1, was compiled for .*cannot load '.*model\.onnx'"):
        open_published(manifest, tmp_path / "other", threads=1)


@pytest.mark.parametrize("tensors", ["inputs", "outputs"])
def test_a_file_with_other_tensors_than_its_manifest_says_is_refused(
    tensors: str, repository: Repository, tmp_path: Path
) -> None:
    other = {tensors: (Tensor(name="ids", dtype="int32", shape=(-1, 8)),)}
    publish_encoder(repository, tmp_path, model_card().model_copy(update=other))
    with refused("engine.other_tensors"):
        load_encoder(tmp_path)


@pytest.mark.parametrize(
    ("engine", "without"),
    [("onnxruntime", "model.onnx"), ("onnxruntime", "labels.json"), ("tensorrt", "tokenizer.json")],
)
def test_a_version_that_lacks_a_file_is_refused(
    engine: str, without: str, repository: Repository, tmp_path: Path
) -> None:
    publish_encoder(repository, tmp_path, model_card(engine=engine), without)
    with refused("version.incomplete"):
        load_encoder(tmp_path)


def test_a_plan_is_opened_and_no_onnx_file_beside_it(repository: Repository, tmp_path: Path) -> None:
    publish_encoder(repository, tmp_path, model_card(engine="tensorrt", device="gpu", architecture="SM90"))
    with refused("version.incomplete"):
        load_encoder(tmp_path)


@pytest.mark.parametrize(("weights_only", "end"), [(False, ""), (True, " but for weights")])
def test_a_quantization_says_how_it_was_made(weights_only: bool, end: str) -> None:
    made = Quantization(method="minmax", smoothing=0.5, exempt=("a", "b"), weights_only=weights_only)
    assert str(made) == f"minmax, smoothing 0.5, 2 nodes in float{end}"
