"""A published version in memory: opened as its key says, on this machine or on none."""

import errno
import io
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import openvino
import pytest
import torch
from upath import UPath

from app.config import BatchingConfig, ServeConfig, TensorParallelConfig
from app.data.targets import save_labels
from app.engines import architecture
from app.engines.architecture import architecture_of
from app.engines.base import Engine, EngineSettings, ShapeProfile
from app.engines.registry import open_engine
from app.errors import EngineError, RecipeError, StorageError
from app.repository.known_answers import KnownAnswers
from app.repository.manifest import Manifest, ModelCard, Quantization, ServingDefaults
from app.repository.repository import Repository
from app.serving.batching.groups import BatchingPolicy, RowsByLength
from app.serving.config import VersionConfig
from app.serving.model.engine import open_published
from app.serving.model.loaded import LoadedModel, load_model
from app.tensors import OUTPUT, Tensor, Tensors
from tests.engine_contract import PROCESSOR, SIGNATURE, TEXTS, encoder, exported, rows
from tests.helpers import ROOT
from tests.publishing import CARD

X86 = platform.machine() == "x86_64"
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def card(**key: object) -> ModelCard:
    """Of the contract's encoder, as compile would publish it here, but for what ``key`` says."""
    precision = key.get("precision", "fp32")
    here = {
        "engine": "onnxruntime",
        "engine_version": "of another day",
        "architecture": architecture_of("cpu", precision),
        **key,
    }
    return CARD.model_copy(
        update={
            "engine_key": CARD.engine_key.model_copy(update=here),
            "inputs": tuple(map(Tensor.of, SIGNATURE.inputs)),
            "outputs": tuple(map(Tensor.of, SIGNATURE.outputs)),
        }
    )


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(UPath(tmp_path / "storage"))


def publish(
    repository: Repository, tmp_path: Path, card: ModelCard, *without: str, known: KnownAnswers | None = None
) -> Manifest:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(exported())
    PROCESSOR.save(UPath(folder))
    save_labels(["bad", "neither", "good"], UPath(folder))
    if known is not None:
        known.save(folder)
    for name in without:
        (folder / name).unlink()
    return repository.publish("toy", UPath(folder), card)


def loaded(tmp_path: Path) -> LoadedModel:
    return load_model(UPath(tmp_path / "storage"), "toy", 1, threads=1)


def right(model: LoadedModel, tmp_path: Path) -> bool:
    """Whether it answers as the published file does."""
    expected = open_engine("onnxruntime", tmp_path / "files/model.onnx").infer(rows(3))[OUTPUT]
    return bool(np.allclose(model.engine.infer(rows(3))[OUTPUT], expected, rtol=0.0, atol=1e-5))


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_version_is_opened_with_the_engine_of_its_key(engine: str, repository: Repository, tmp_path: Path) -> None:
    publish(repository, tmp_path, card(engine=engine))
    model = loaded(tmp_path)
    assert (model.engine.name, model.platform) == (engine, f"{engine}_onnx")
    assert right(model, tmp_path)
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

    publish(repository, tmp_path, card(profile=ShapeProfile(batch_sizes=(1,), lengths=(8, 16, 32))))
    full_batches = BatchingPolicy(max_batch_size=4, by_length=by_length).full_batches
    load_model(UPath(tmp_path / "storage"), "toy", 1, 1, full_batches, open_engine=opened)
    assert ran == [(1, 8), (1, 16), (1, 32), *full]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_its_precision_is_that_of_its_key_or_it_is_refused(
    precision: str, repository: Repository, tmp_path: Path
) -> None:
    publish(repository, tmp_path, card(engine="openvino", precision=precision))
    if precision.upper() in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        settings = EngineSettings(precision=precision)
        expected = open_engine("openvino", tmp_path / "files/model.onnx", settings).infer(rows(3))[OUTPUT]
        assert np.array_equal(loaded(tmp_path).engine.infer(rows(3))[OUTPUT], expected)
        assert not right(loaded(tmp_path), tmp_path)
    else:
        with pytest.raises(
            EngineError, match=f"compiled for openvino of another day, {precision}.*does not compute in"
        ):
            loaded(tmp_path)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("is_changed", [False, True])
def test_another_version_of_an_engine_serves_what_rounds_if_it_gives_the_known_answers(
    precision: str, is_changed: bool, repository: Repository, tmp_path: Path
) -> None:
    right_logits = encoder()(**{name: torch.from_numpy(array) for name, array in rows(3).items()}).detach().numpy()
    known = KnownAnswers(rows(3), {OUTPUT: right_logits + (0.1 if is_changed else 0.0)})
    publish(repository, tmp_path, card(precision=precision).model_copy(update={"max_difference": 0.01}), known=known)
    if is_changed and precision != "fp32":
        with pytest.raises(EngineError, match=r"up to 1\.0e-01 from PyTorch's, and were 1\.0e-02; run jobs\.compile"):
            loaded(tmp_path)
    else:
        assert right(loaded(tmp_path), tmp_path)


@pytest.mark.skipif(not X86, reason="needs an x86 CPU, which oneDNN can be told to use less of")
def test_a_precision_that_this_cpu_lacks_is_refused_with_the_key(repository: Repository, tmp_path: Path) -> None:
    publish(repository, tmp_path, card(engine="openvino", precision="fp16"))
    code = (
        "import sys; from upath import UPath; from app.serving.model.loaded import load_model;"
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
    publish(repository, tmp_path, card())
    model = loaded(tmp_path)
    assert f"was checked with onnxruntime of another day, fp32, on cpu {platform.machine()}" in caplog.text
    assert f"{model.engine.version} compiled it again" in caplog.text


@pytest.mark.parametrize(
    "elsewhere",
    [{"architecture": "riscv64"}, pytest.param({"device": "gpu", "architecture": "SM90"}, marks=WITHOUT_GPU)],
)
def test_in_float32_another_machine_compiles_it_anew_and_says_so(
    elsewhere: dict[str, str], repository: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(repository, tmp_path, card(**elsewhere))
    assert right(loaded(tmp_path), tmp_path)
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
    publish(repository, tmp_path, card(**key))
    with pytest.raises(EngineError) as refused:
        loaded(tmp_path)
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
    publish(repository, tmp_path, card(precision="int8", architecture=f"x86_64 {judged} VNNI"))
    with pytest.raises(EngineError) as refused:
        loaded(tmp_path)
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
    manifest = repository.publish("toy", UPath(tmp_path / "other"), card())
    with pytest.raises(EngineError, match=r"version 1, was compiled for .*cannot load '.*model\.onnx'"):
        open_published(manifest, tmp_path / "other", threads=1)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            "inputs",
            r"takes input_ids int64 \[-1, -1\], .*, expected ids int32 \[-1, 8\], as its manifest says",
        ),
        ("outputs", r"gives logits float32 \[-1, 3\], expected ids int32"),
    ],
)
def test_a_file_with_other_tensors_than_its_manifest_says_is_refused(
    tensors: str, words: str, repository: Repository, tmp_path: Path
) -> None:
    other = {tensors: (Tensor(name="ids", dtype="int32", shape=(-1, 8)),)}
    publish(repository, tmp_path, card().model_copy(update=other))
    with pytest.raises(EngineError, match=words):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("engine", "without", "words"),
    [
        ("onnxruntime", "model.onnx", "has no model.onnx, which onnxruntime opens"),
        ("onnxruntime", "labels.json", "has no labels.json"),
        ("tensorrt", "tokenizer.json", "has no tokenizer.json"),
    ],
)
def test_a_version_that_lacks_a_file_is_refused(
    engine: str, without: str, words: str, repository: Repository, tmp_path: Path
) -> None:
    publish(repository, tmp_path, card(engine=engine), without)
    with pytest.raises(StorageError, match=words):
        loaded(tmp_path)


def test_a_plan_is_opened_and_no_onnx_file_beside_it(repository: Repository, tmp_path: Path) -> None:
    publish(repository, tmp_path, card(engine="tensorrt", device="gpu", architecture="SM90"))
    with pytest.raises(StorageError, match=r"has no model\.plan, which tensorrt opens"):
        loaded(tmp_path)


def test_what_was_compiled_is_found_by_the_next_replica(repository: Repository, tmp_path: Path) -> None:
    publish(repository, tmp_path, card(engine="openvino"))
    loaded(tmp_path)
    (kept,) = (tmp_path / "cache/engines").iterdir()
    written = kept.stat().st_mtime_ns
    assert right(loaded(tmp_path), tmp_path)
    assert [(path, path.stat().st_mtime_ns) for path in (tmp_path / "cache/engines").iterdir()] == [(kept, written)]


def test_what_no_replica_has_asked_for_in_a_month_is_forgotten(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "cache/engines").mkdir(parents=True)
    for name, age_days in (("old", 31), ("young", 29)):
        (tmp_path / "cache/engines" / name).write_bytes(b"?")
        age = (tmp_path / "cache/engines" / name).stat().st_atime - age_days * 86400
        os.utime(tmp_path / "cache/engines" / name, (age, age))
    publish(repository, tmp_path, card(engine="openvino"))
    loaded(tmp_path)
    left = {path.name for path in (tmp_path / "cache/engines").iterdir()}
    assert (len(left), "young" in left, "old" in left) == (2, True, False)


def test_a_cache_that_cannot_be_used_is_told_of_once(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(repository, tmp_path, card(engine="openvino"))
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("RAYLOOM_CACHE", str(tmp_path / "file/cache"))  # root may write into any folder, but not here
    caplog.set_level(logging.WARNING, "app.engines.cache")
    for _ in range(2):
        assert right(loaded(tmp_path), tmp_path)
    told = [record.getMessage() for record in caplog.records if record.name == "app.engines.cache"]
    assert len(told) == 1
    assert "file/cache/engines' cannot be read or written (Not a directory)" in told[0]


def test_a_full_disk_leaves_nothing_half_written(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(repository, tmp_path, card(engine="openvino"))
    open_file = Path.open

    class FullDisk(io.FileIO):
        def write(self, content: Any) -> int:
            super().write(bytes(content)[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> IO[Any]:
        if path.parent == tmp_path / "cache/engines" and mode == "wb":
            return cast(IO[Any], FullDisk(path, mode))
        return open_file(path, mode, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        model = loaded(tmp_path)
    assert right(model, tmp_path)
    assert "No space left on device" in caplog.text
    assert list((tmp_path / "cache/engines").iterdir()) == []


MEASURED = ServingDefaults(max_batch_size=16, preferred_batch_sizes=(4, 16), timeout_us=300, replicas=2, threads=3)
HALVES = TensorParallelConfig(size=2, cpus_per_process=4.5)
"""Compile measured the whole model."""


@pytest.mark.parametrize(
    ("given", "served"),
    [
        (ServeConfig(), MEASURED),
        (
            ServeConfig(batching=BatchingConfig(max_batch_size=8, timeout_us=0), replicas=5, threads=1),
            ServingDefaults(max_batch_size=8, preferred_batch_sizes=(4,), timeout_us=0, replicas=5, threads=1),
        ),
        (ServeConfig(threads=1), MEASURED.model_copy(update={"threads": 1})),
        (ServeConfig(replicas=3), MEASURED.model_copy(update={"replicas": 3, "threads": 2})),  # of the same six cores
        (ServeConfig(replicas=4), MEASURED.model_copy(update={"replicas": 4, "threads": 1})),
        (ServeConfig(replicas=8), MEASURED.model_copy(update={"replicas": 8, "threads": 1})),
        (
            ServeConfig(batching=BatchingConfig(max_batch_size=1)),
            MEASURED.model_copy(update={"max_batch_size": 1, "preferred_batch_sizes": ()}),
        ),
        (
            ServeConfig(batching=BatchingConfig(preferred_batch_sizes=[2, 16])),
            MEASURED.model_copy(update={"preferred_batch_sizes": (2, 16)}),
        ),
        (
            ServeConfig(batching=BatchingConfig(max_batch_size=64)),
            MEASURED.model_copy(update={"max_batch_size": 64}),
        ),
        (ServeConfig(tensor_parallel=HALVES), MEASURED.model_copy(update={"replicas": 1, "threads": 4})),
        (ServeConfig(tensor_parallel=HALVES, replicas=3), MEASURED.model_copy(update={"replicas": 3, "threads": 4})),
    ],
)
def test_a_recipe_wins_and_what_it_leaves_out_is_as_compile_measured(
    given: ServeConfig, served: ServingDefaults
) -> None:
    assert card().model_copy(update={"serving": MEASURED}).served(given) == served


@pytest.mark.parametrize(
    ("batching", "by_length"),
    [
        (BatchingConfig(timeout_us=7), {16: 16, 32: 2}),
        (BatchingConfig(preferred_batch_sizes=[]), {16: 16, 32: 2}),
        (BatchingConfig(max_batch_size=16), {}),
        (BatchingConfig(preferred_batch_sizes=[4]), {}),
    ],
)
def test_sizes_by_length_are_published_and_sizes_in_a_recipe_win(
    batching: BatchingConfig, by_length: dict[int, int], repository: Repository, tmp_path: Path
) -> None:
    measured = ServingDefaults.model_validate({**dict(MEASURED), "max_batch_size_by_length": {"16": 16, "32": 2}})
    publish(repository, tmp_path, card().model_copy(update={"serving": measured}))
    manifest = repository.manifest("toy", 1)
    assert manifest.serving == measured
    assert manifest.served(ServeConfig(batching=batching)).max_batch_size_by_length == by_length
    policy = VersionConfig.of("storage", manifest, ServeConfig(batching=batching)).policy
    assert [policy.max_rows(rows(1, length)) for length in (8, 32)] == ([16, 2] if by_length else [16, 16])


def test_a_manifest_without_sizes_by_length_has_one_size_for_all() -> None:
    earlier = MEASURED.model_dump()
    del earlier["max_batch_size_by_length"]
    assert ServingDefaults.model_validate(earlier) == MEASURED
    with pytest.raises(ValueError, match=r"max_batch_size_by_length is {8: 17}: expected 16"):
        ServingDefaults.model_validate({**earlier, "max_batch_size_by_length": {8: 17}})


def test_a_batch_is_not_larger_than_a_plan_takes() -> None:
    profile = ShapeProfile(batch_sizes=(1, 16), lengths=(16,))
    plan = card(engine="tensorrt", profile=profile).model_copy(update={"serving": MEASURED})
    assert plan.served(ServeConfig()) == MEASURED
    with pytest.raises(RecipeError) as refused:
        plan.served(ServeConfig(batching=BatchingConfig(max_batch_size=17)))
    assert str(refused.value) == (
        "serve.batching.max_batch_size is 17: the plan was built for 16 rows at most; give as many, or more in "
        "compile.batch_sizes and run jobs.compile"
    )


def test_rows_that_no_batch_reaches_are_not_preferred() -> None:
    measured = card().model_copy(update={"serving": MEASURED})
    with pytest.raises(RecipeError) as refused:
        measured.served(ServeConfig(batching=BatchingConfig(preferred_batch_sizes=[4, 17])))
    assert str(refused.value) == (
        "serve.batching.preferred_batch_sizes are [4, 17]: expected 16 at most, which is max_batch_size"
    )


@pytest.mark.parametrize(("weights_only", "end"), [(False, ""), (True, " but for weights")])
def test_a_quantization_says_how_it_was_made(weights_only: bool, end: str) -> None:
    made = Quantization(method="minmax", smoothing=0.5, exempt=("a", "b"), weights_only=weights_only)
    assert str(made) == f"minmax, smoothing 0.5, 2 nodes in float{end}"
