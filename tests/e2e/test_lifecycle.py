"""The whole path as a person takes it: jobs through 'ray job submit', questions over HTTP."""

import base64
import concurrent.futures
import hashlib
import json
import shlex
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.utils import InferenceServerException

from app.data.sources.formats.builtin import find_examples
from app.data.sources.source import Source
from tests.helpers import rayloom, result_of, run, submit
from tests.jobs import run_job

DIGITS = ["recipes/digits.yaml", "train.epochs=8", "tune.trials=2", "tune.epochs=1", "compile.batch_sizes=[1, 8]"]


@pytest.fixture(scope="module")
def deployed(cluster: dict[str, str]) -> dict[str, Any]:
    """The result of the digits' lifecycle."""
    return submit(cluster, "lifecycle", *DIGITS)


@pytest.fixture(scope="module")
def endpoint(deployed: dict[str, Any]) -> httpx.Client:
    return httpx.Client(base_url=deployed["artifacts"]["http"], timeout=30)


@pytest.fixture(scope="module")
def pictures() -> tuple[list[bytes], list[str]]:
    examples = find_examples(Source("builtin:digits"))
    return list(examples.inputs[:40]), examples.labels[:40]


def pixels(count: int = 1, **change: object) -> dict[str, Any]:
    data = np.linspace(-1, 1, count * 64).tolist()
    return {"inputs": [{"name": "pixel_values", "shape": [count, 1, 8, 8], "datatype": "FP32", "data": data, **change}]}


def test_the_result_says_what_was_reached(deployed: dict[str, Any], cluster: dict[str, str]) -> None:
    metrics = deployed["metrics"]
    assert deployed["status"] == "succeeded"
    assert metrics["tune"]["trials"] == 2
    assert metrics["train"]["val_accuracy"] >= 0.97
    variants = {(metric["engine"], metric["precision"]): metric for metric in metrics["compile"]["variants"]}
    assert set(variants) >= {(engine, "fp32") for engine in ("openvino", "onnxruntime", "torch")}
    assert all(variant["max_difference"] <= 1e-4 for (_, precision), variant in variants.items() if precision == "fp32")
    asked = {(metric["engine"], metric["precision"]) for metric in metrics["compile"]["skipped"]} | set(variants)
    assert asked >= {(engine, precision) for engine in ("openvino", "onnxruntime") for precision in ("bf16", "int8")}
    assert metrics["compile"]["chosen"]["accuracy"] == pytest.approx(metrics["train"]["val_accuracy"], abs=0.011)
    assert metrics["deploy"]["ready_s"] > 0
    assert list(metrics["stage_s"]) == ["up", "start", "search", "train", "compile", "deploy"]
    assert all(0 < seconds < deployed["duration_s"] for seconds in list(metrics["stage_s"].values())[2:])
    manifest = Path(cluster["RAYLOOM_STORAGE"]) / "models" / deployed["artifacts"]["model"] / "manifest.json"
    search = Path(deployed["artifacts"]["best_recipe"]).parent.name
    trial = json.loads(manifest.read_text(encoding="utf-8"))["lineage"]["trial"]
    assert trial == f"trial {metrics['tune']['best_trial']} of {search}"
    for job in ("tune", "train", "compile", "deploy", "lifecycle"):
        kept = max(Path(cluster["RAYLOOM_STORAGE"]).glob(f"runs/{job}/*-digits-*/result.json"))
        assert json.loads(kept.read_text(encoding="utf-8"))["status"] == "succeeded"


def test_every_run_has_a_page_and_a_log_and_the_lifecycle_links_its_parts(
    deployed: dict[str, Any], cluster: dict[str, str]
) -> None:
    runs = Path(cluster["RAYLOOM_STORAGE"]) / "runs"
    report = Path(deployed["artifacts"]["report"])
    assert report.parent.parent.name == "lifecycle"
    page = report.read_text(encoding="utf-8")
    assert "trial " in page
    for job in ("tune", "train", "compile", "deploy"):
        folder = max(runs.glob(f"{job}/*-digits-*/result.json")).parent
        assert f'<a href="../../{job}/{folder.name}/report.html">{folder.name}</a>' in page
        assert folder.name in page
        assert (folder / "report.html").stat().st_size > 10_000
        assert (folder / "log.txt").stat().st_size > 0
        assert not (folder / "heartbeat").exists()
    assert "── deploy ──" in (report.parent / "log.txt").read_text(encoding="utf-8")


def test_nothing_temporary_is_left(deployed: dict[str, Any], cluster: dict[str, str]) -> None:
    assert not list(Path(cluster["RAYLOOM_STORAGE"]).rglob("*.tmp"))


def test_health_and_metadata(endpoint: httpx.Client) -> None:
    assert endpoint.get("/v2/health/live").status_code == 200
    assert endpoint.get("/v2/health/ready").status_code == 200
    assert endpoint.get("/v2/models/digits/ready").status_code == 200
    assert endpoint.get("/v2").json()["name"] == "rayloom"
    metadata = endpoint.get("/v2/models/digits").json()
    assert metadata["inputs"] == [{"name": "pixel_values", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
    assert metadata["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}]
    assert endpoint.get(f"/v2/models/digits/versions/{metadata['versions'][0]}").json() == metadata
    assert endpoint.get("/docs").status_code == 200


def test_infer_answers_tensors(endpoint: httpx.Client) -> None:
    answer = endpoint.post("/v2/models/digits/infer", json={"id": "7", **pixels(3)}).json()
    assert (answer["model_name"], answer["id"]) == ("digits", "7")
    (output,) = answer["outputs"]
    assert (output["name"], output["shape"], len(output["data"])) == ("logits", [3, 10], 30)


def test_grpc_answers_as_http_does(endpoint: httpx.Client, deployed: dict[str, Any]) -> None:
    client = tritonclient.grpc.InferenceServerClient(deployed["artifacts"]["grpc"])
    assert client.is_model_ready("digits")
    given = tritonclient.grpc.InferInput("pixel_values", [3, 1, 8, 8], "FP32")
    given.set_data_from_numpy(np.linspace(-1, 1, 3 * 64, dtype=np.float32).reshape(3, 1, 8, 8))
    logits = client.infer("digits", [given]).as_numpy("logits")
    expected = endpoint.post("/v2/models/digits/infer", json=pixels(3)).json()["outputs"][0]["data"]
    assert np.allclose(logits.ravel(), expected, atol=1e-5)
    with pytest.raises(InferenceServerException, match="'other' is not deployed"):
        client.infer("other", [given])


def test_predict_reads_pictures(endpoint: httpx.Client, pictures: tuple[list[bytes], list[str]]) -> None:
    inputs = [base64.b64encode(picture).decode() for picture in pictures[0][:32]]
    predictions = endpoint.post("/v1/models/digits/predict", json={"inputs": inputs}).json()["predictions"]
    right = [given["label"] == label for given, label in zip(predictions, pictures[1], strict=False)]
    assert len(right) == 32
    assert sum(right) >= 30
    assert sum(predictions[0]["scores"].values()) == pytest.approx(1.0, abs=1e-4)


def test_a_request_may_have_more_rows_than_a_call(endpoint: httpx.Client) -> None:
    answer = endpoint.post("/v2/models/digits/infer", json=pixels(100))
    assert answer.status_code == 200
    assert answer.json()["outputs"][0]["shape"] == [100, 10]


def test_requests_at_once_answer_as_alone(endpoint: httpx.Client, pictures: tuple[list[bytes], list[str]]) -> None:
    def ask(picture: bytes) -> dict[str, float]:
        body = {"inputs": base64.b64encode(picture).decode()}
        return endpoint.post("/v1/models/digits/predict", json=body).json()["predictions"][0]["scores"]

    alone = [ask(picture) for picture in pictures[0]]
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        together = list(pool.map(ask, pictures[0]))
    for one, other in zip(alone, together, strict=True):
        assert other == pytest.approx(one, abs=0.01)  # in bf16 a batch rounds as its kernel does


def test_a_bad_request_does_not_spoil_those_it_shares_a_call_with(endpoint: httpx.Client) -> None:
    def ask(index: int) -> int:
        body = pixels(data=[3e38] * 64) if index == 3 else pixels()
        return endpoint.post("/v2/models/digits/infer", json=body).status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [400 if index == 3 else 200 for index in range(8)]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v2/models/digits/infer", b"{", 400, "Invalid JSON"),
        ("/v2/models/digits/infer", pixels(shape=[1, 64]), 400, "input 'pixel_values' has shape [1, 64]"),
        ("/v2/models/digits/infer", pixels(datatype="FP64"), 400, "input 'pixel_values' is float64: expected float32"),
        ("/v2/models/digits/infer", pixels(data=[1.0]), 400, "1 elements, its shape is [1, 1, 8, 8]"),
        ("/v2/models/digits/infer", pixels(name="x"), 400, "input 'x' is not known: expected pixel_values"),
        ("/v2/models/digits/infer", pixels(1025), 400, "1025 rows: at most 1024"),
        ("/v2/models/digits/infer", pixels(data=[3e38] * 64), 400, "output 'logits' is not finite"),
        ("/v2/models/other/infer", pixels(), 404, "model 'other' is not deployed: deployed are digits"),
        ("/v2/models/digits/versions/99/infer", pixels(), 404, "no version '99' here"),
        ("/v1/models/digits/predict", {"inputs": []}, 400, "empty list"),
        ("/v1/models/digits/predict", {"inputs": "?"}, 400, "not base64"),
        ("/v1/models/digits/predict", {"inputs": "YWJj"}, 400, "cannot be read"),
        ("/v1/models/digits/predict", {"input": "YWJj"}, 400, "unknown key 'input'; did you mean 'inputs'?"),
        ("/v2/nothing", b"", 404, "no POST /v2/nothing here"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(
    endpoint: httpx.Client, path: str, body: bytes | dict[str, Any], status: int, words: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = endpoint.post(path, content=content)
    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_the_endpoint_is_on_loopback_only(endpoint: httpx.Client) -> None:
    address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing; picks the interface that would
            address = probe.getsockname()[0]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((address, endpoint.base_url.port or 80), timeout=5).close()


@pytest.mark.slow
def test_a_second_model_and_the_words_of_the_command_line(
    cluster: dict[str, str], endpoint: httpx.Client, tmp_path: Path
) -> None:
    table = "text,label\n" + "".join(f"{word} {i},{label}\n" for i in range(60) for word, label in WORDS)
    (tmp_path / "words.csv").write_text(table, encoding="utf-8")
    recipe = [
        "recipes/reviews.yaml",
        "name=words",
        "tune=null",
        f"data.source={tmp_path / 'words.csv'}",
        "train.epochs=4",
        "train.early_stopping=null",
        "train.precision=fp32",
        "train.global_batch_size=16",
        "compile.engines=[openvino]",
        "model.args={layers: 1, width: 32, heads: 2}",
    ]
    result = run_job(cluster, "lifecycle", *recipe)
    assert result["metrics"]["train"]["val_accuracy"] == 1.0
    served = endpoint.post("/v2/repository/index").json()
    assert [(item["name"], item["state"]) for item in served] == [("digits", "READY"), ("words", "READY")]
    assert run("rayloom", "status", environment=cluster).stdout.count("version") == 2
    predicted = run("rayloom", "predict", "words", "good 99", "awful 7", environment=cluster)
    assert [line.split()[0] for line in predicted.stdout.splitlines()] == ["yes", "no"]
    refused = run("rayloom", "predict", "nothing", "good", environment=cluster)
    assert refused.returncode == 2
    assert "model 'nothing' is not deployed: deployed are digits, words" in refused.stderr


WORDS = [("good", "yes"), ("fine", "yes"), ("bad", "no"), ("awful", "no")]


def test_a_damaged_version_is_not_deployed_and_the_old_one_stays(
    cluster: dict[str, str], endpoint: httpx.Client, deployed: dict[str, Any]
) -> None:
    storage = Path(cluster["RAYLOOM_STORAGE"])
    second = run_job(cluster, "compile", *DIGITS, "compile.engines=[openvino]")["artifacts"]["model"].rpartition("/")[2]
    model = storage / "models/digits" / second / "model.onnx"
    model.write_bytes(model.read_bytes()[:-100])
    result = run_job(cluster, "deploy", *DIGITS, succeeds=False)
    assert result["status"] == "failed"
    assert "model.onnx" in result["error"]
    first = deployed["artifacts"]["model"].rpartition("/")[2]
    assert endpoint.get("/v2/models/digits").json()["versions"] == [first]
    assert endpoint.post("/v2/models/digits/infer", json=pixels()).status_code == 200
    back = run_job(cluster, "deploy", *DIGITS, f"serve.version={first}")
    assert back["artifacts"]["model"] == f"digits/{first}"


def test_the_version_that_is_served_can_be_traced_and_not_deleted(
    cluster: dict[str, str], deployed: dict[str, Any], tmp_path: Path
) -> None:
    def models(*arguments: str) -> subprocess.CompletedProcess[str]:
        return rayloom("models", *arguments, environment=cluster)

    version = deployed["artifacts"]["model"].rpartition("/")[2]
    shown = " ".join(models("show", "digits", version).stdout.split())
    assert "input pixel_values float32 [-1, 1, 8, 8] output logits float32 [-1, 10]" in shown
    assert f"train run {Path(deployed['artifacts']['weights']).parent}" in shown
    assert models("verify", "digits", version).returncode == 0
    assert models("promote", "digits", version).stdout.endswith("the endpoint serves it already\n")
    refused = models("delete", "digits", version)
    assert refused.returncode == 2
    assert f"version {version}, is served at http://127.0.0.1" in refused.stderr
    assert models("export", "digits", version, str(tmp_path)).returncode == 0
    config = text_format.Parse((tmp_path / "digits/config.pbtxt").read_text(encoding="utf-8"), ModelConfig())
    assert [list(tensor.dims) for tensor in config.input] == [[1, 8, 8]]


def test_an_endpoint_asks_for_a_token_that_ray_never_sees(
    cluster: dict[str, str], endpoint: httpx.Client, deployed: dict[str, Any]
) -> None:
    result = submit(cluster, "deploy", *DIGITS, "serve.auth=token")  # its log is checked, too
    token = (Path(cluster["RAYLOOM_HOME"]) / "endpoint_token").read_text(encoding="utf-8")
    shown = {"authorization": f"Bearer {token}"}
    assert [endpoint.get(path).status_code for path in ("/v2", "/v2/health/ready", "/")] == [401, 200, 200]
    assert endpoint.get("/v2", headers=shown).status_code == 200
    client = tritonclient.grpc.InferenceServerClient(result["artifacts"]["grpc"])
    assert client.is_server_ready()
    with pytest.raises(InferenceServerException, match="asks for a token") as refused:
        client.get_model_metadata("digits")
    assert refused.value.status() == "StatusCode.UNAUTHENTICATED"
    assert client.get_model_metadata("digits", headers=shown).name == "digits"
    status = rayloom("status", environment=cluster).stdout
    command = next(line.split(maxsplit=1)[1] for line in status.splitlines() if "rayloom predict digits" in line)
    pasted = run(*shlex.split(command), environment=cluster)
    assert pasted.returncode == 0, pasted.stderr
    access = {"Authorization": f"Bearer {Path(cluster['RAY_AUTH_TOKEN_PATH']).read_text(encoding='utf-8')}"}
    serve = httpx.get(f"{cluster['RAY_API_SERVER_ADDRESS']}/api/serve/applications/", headers=access).text
    assert hashlib.sha256(token.encode()).hexdigest() in serve
    state = json.loads((Path(cluster["RAYLOOM_HOME"]) / "cluster/cluster.json").read_text(encoding="utf-8"))
    files = [path for path in Path(state["runtime"]).rglob("*") if path.suffix in (".log", ".out", ".err")]
    assert files
    logs = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    assert not any(token in text for text in [serve, json.dumps(result), status, *logs])
    run_job(cluster, "deploy", *DIGITS)
    assert endpoint.get("/v2").status_code == 401  # what asked for a token goes on to
    run_job(cluster, "deploy", *DIGITS, "serve.auth=none")
    assert endpoint.get("/v2").status_code == 200


def test_a_gate_that_does_not_hold_publishes_nothing(cluster: dict[str, str], deployed: dict[str, Any]) -> None:
    models = Path(cluster["RAYLOOM_STORAGE"]) / "models/digits"
    before = sorted(models.iterdir())
    gate = ("compile.engines=[openvino]", "compile.gates.max_difference=1e-12")
    result = run_job(cluster, "compile", *DIGITS, *gate, succeeds=False)
    assert "compile.gates.max_difference" in result["error"]
    assert sorted(models.iterdir()) == before


@pytest.mark.parametrize(
    ("job", "overrides", "words"),
    [
        ("train", "train.workers=64", "train.workers, of which there are 64, need 64 CPUs, and the cluster has"),
        ("deploy", "serve.cpus_per_replica=64 serve.replicas=9", "need 640 CPUs, and the cluster has"),
        ("deploy", "serve.port=9", "serve.port is 9 and serve.grpc_port "),
    ],
)
def test_a_job_that_is_refused_fails(
    cluster: dict[str, str], deployed: dict[str, Any], job: str, overrides: str, words: str
) -> None:
    before = sorted(Path(cluster["RAYLOOM_STORAGE"]).glob("*/*/*"))
    result = run_job(cluster, job, "recipes/digits.yaml", *overrides.split(), succeeds=False)
    assert words in result["error"]
    assert sorted(Path(cluster["RAYLOOM_STORAGE"]).glob("*/*/*")) == before


def test_a_recipe_from_elsewhere_goes_with_its_job(cluster: dict[str, str], tmp_path: Path) -> None:
    text = Path("recipes/digits.yaml").read_text(encoding="utf-8").replace("name: digits", "name: from-elsewhere")
    (tmp_path / "best.yaml").write_text(text, encoding="utf-8")
    done = run("rayloom", "submit", "compile", str(tmp_path / "best.yaml"), environment=cluster)
    result = result_of(done.stdout.partition("Status message:")[0])
    assert (done.returncode, result["recipe"]) == (1, "from-elsewhere")
    assert "no finished train run of recipe 'from-elsewhere'" in result["error"]


@pytest.mark.slow
def test_plans_are_for_the_cluster_that_runs_the_job_or_for_a_named_one(cluster: dict[str, str]) -> None:
    here = run("rayloom", "submit", "plan", "recipes/digits.yaml", environment=cluster)
    assert here.returncode == 0, here.stdout + here.stderr
    assert " parameters on 2 x cpu, global batch " in here.stdout
    found = json.loads(Path(result_of(here.stdout)["artifacts"]["plans"]).read_text(encoding="utf-8"))
    assert (found["devices"], len(found["plans"])) == (2, 5)
    named = submit(cluster, "plan", "recipes/digits.yaml", "--cluster", "4xa100-80", "--top", "1")
    assert named["metrics"]["plan"]["data"] == 4
    refused = submit(cluster, "plan", "recipes/digits.yaml", "--cluster", "4xa10", succeeds=False)
    assert "did you mean a100-40 or a100-80?" in refused["error"]


def test_submit_refuses_before_it_sends_anything(cluster: dict[str, str]) -> None:
    for arguments, words in (
        (["train", "recipes/digits.yaml", "train.epoch=1"], "'epochs'"),
        (["trian", "recipes/digits.yaml"], "known are compile, deploy, lifecycle, plan, prepare, train, tune"),
        (["train", "/etc/hostname"], "recipe '/etc/hostname' holds "),
    ):
        refused = rayloom("submit", *arguments, environment=cluster)
        assert refused.returncode == 2
        assert words in refused.stderr
        assert refused.stdout == ""
