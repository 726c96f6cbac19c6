"""Metrics: what is counted of requests and runs, how Ray is told, and that the table in the docs is right."""

import math
import time
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from prometheus_client import CollectorRegistry, Counter, Histogram
from upath import UPath

from app.config import load_recipe
from app.data.targets import Answer, Classes, LabelSets, Numbers, Outputs, Scale
from app.engines.base import Signature
from app.published.loaded import load_model
from app.serving.agreement import agreeing_rows
from app.serving.batching.statistics import BatchingStatistics, Buckets
from app.serving.config import CandidateConfig, DeployedModel
from app.serving.metrics import endpoint_values
from app.serving.protocol.infer import InferResponse
from app.serving.traffic import Traffic
from app.tasks import find_served_task
from app.telemetry import catalog
from app.telemetry.metrics import Distribution, Kind, Metric, Publisher, Sample
from app.telemetry.record import MemoryRecord
from app.tensors import OUTPUT, TensorSpec
from app.training.checkpoints.writer import Commit
from app.training.records import EpochRecord, StepRecord
from app.training.reporting.run_metrics import RunMetrics
from serve_deployments.metrics import ingress_samples
from tests.engine_contract import PROCESSOR, exported, rows
from tests.helpers import ROOT, wait_until
from tests.pages import tables
from tests.serving import Server, serving
from tests.toy import LABELS, answering, body, endpoint_config, one_column, publish, publish_version, version_config

INFER = "/v2/models/toy/infer"
COUNTER = Metric("rayloom_spoons", Kind.COUNTER, "", ("color",))
GAUGE = Metric("rayloom_heat", Kind.GAUGE, "", ("color",))
HISTOGRAM = Metric("rayloom_wait_seconds", Kind.HISTOGRAM, "", ("color",))


@dataclass
class FakeRay:
    """Has metrics as ``ray.util.metrics`` has, and keeps what they are told."""

    told: dict[tuple[str, ...], float] = field(default_factory=dict)

    def Counter(self, name: str, description: str, tag_keys: tuple[str, ...]) -> "Instrument":
        return Instrument(self, name, tag_keys)

    Gauge = Counter


@dataclass
class Instrument:
    ray: FakeRay
    name: str
    tag_keys: tuple[str, ...]

    def inc(self, value: float, tags: Mapping[str, str]) -> None:
        assert value > 0
        self.set(self.ray.told.get(self.key(tags), 0.0) + value, tags)

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        self.ray.told[self.key(tags)] = value

    def key(self, tags: Mapping[str, str]) -> tuple[str, ...]:
        return (self.name, *(tags[key] for key in self.tag_keys))


def test_ray_is_told_what_has_changed() -> None:
    ray, buckets = FakeRay(), Buckets([0.1, 1.0])
    publisher = Publisher(ray)
    for value in (0.05, 0.1, 0.5, 7.0):
        buckets.add(value)
    values = [COUNTER.of(3, "red"), GAUGE.of(4.5, "red"), buckets.of(HISTOGRAM, "red")]
    publisher.publish(values)
    assert ray.told == {
        ("rayloom_spoons", "red"): 3,
        ("rayloom_heat", "red"): 4.5,
        ("rayloom_wait_seconds_bucket", "red", "0.1"): 2,
        ("rayloom_wait_seconds_bucket", "red", "1"): 3,
        ("rayloom_wait_seconds_bucket", "red", "+Inf"): 4,
        ("rayloom_wait_seconds_count", "red"): 4,
        ("rayloom_wait_seconds_sum", "red"): pytest.approx(7.65),
    }


def test_values_that_stay_the_same_are_told_again() -> None:
    """Ray drops a gauge that is not set again, and each histogram is several gauges. It keeps counters."""
    ray, buckets = FakeRay(), Buckets([0.1, 1.0])
    publisher = Publisher(ray)
    buckets.add(0.5)
    publisher.publish([COUNTER.of(3, "red"), GAUGE.of(4.5, "red"), buckets.of(HISTOGRAM, "red")])
    told = dict(ray.told)
    ray.told = {key: value for key, value in told.items() if key[0] == COUNTER.name}
    publisher.repeat()
    assert ray.told == told
    ray.told.clear()
    publisher.publish([COUNTER.of(5, "red")])
    assert ray.told == {("rayloom_spoons", "red"): 2}  # a removed value is not repeated


def test_a_count_that_begins_anew_is_added() -> None:
    ray = FakeRay()
    publisher = Publisher(ray)
    for value in (5, 2, 3):
        publisher.publish([COUNTER.of(value, "red")])
    assert ray.told["rayloom_spoons", "red"] == 8


def test_the_page_lists_every_metric() -> None:
    page = ROOT / "docs/reference/metrics.md"
    listed = [row for table in tables(page) if table[0][0] == "metric" for row in table[1:]]
    declared = [
        [metric.exported, metric.kind.value, ", ".join(metric.labels)]
        for metric in (*catalog.SERVING, *catalog.GENERATION, *catalog.TRAINING, *catalog.TUNING)
    ]
    own = [row[:3] for row in listed if row[0].startswith("ray_")]  # tests of monitoring know the cluster's
    assert own == declared


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    folder = UPath(tmp_path_factory.mktemp("metrics"))
    publish(folder, exported(), answering(1))
    return folder


def samples(server: Server, metric: Metric) -> dict[tuple[str, ...], float]:
    found = (value for value in endpoint_values(server.endpoint) if value.metric is metric)
    return {value.labels: value.value for value in found if isinstance(value, Sample)}


def distribution(server: Server, metric: Metric) -> Distribution:
    (found,) = (value for value in endpoint_values(server.endpoint) if value.metric is metric)
    assert isinstance(found, Distribution)
    return found


@pytest.mark.parametrize("fast", [True, False])
def test_requests_are_counted_once_however_they_come(storage: UPath, fast: bool) -> None:
    with serving(fast=fast) as server:
        server.run(server.endpoint.update(endpoint_config(DeployedModel(production=version_config(storage, 1)))))
        url = f"http://{server.http}"
        sent = body(rows(2))
        answers = [httpx.post(url + INFER, json=sent) for _ in range(3)]
        httpx.post(url + INFER, json={"inputs": []})
        httpx.post(url + "/v2/models/other/infer", json=sent)
        httpx.post(url + "/v1/models/toy/predict", json={"inputs": "fine"})
        tensors = rows(1)
        inputs = [tritonclient.grpc.InferInput(name, list(array.shape), "INT64") for name, array in tensors.items()]
        for input_ in inputs:
            input_.set_data_from_numpy(tensors[input_.name()])
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            client.infer("toy", inputs)
            with pytest.raises(tritonclient.grpc.InferenceServerException):
                client.infer("toy", inputs[:0])
        assert samples(server, catalog.REQUESTS) == {
            ("toy", "1", "http", "ok"): 3,
            ("toy", "1", "http", "invalid"): 1,
            ("", "", "http", "not_served"): 1,
            ("toy", "1", "natural", "ok"): 1,
            ("toy", "1", "grpc", "ok"): 1,
            ("toy", "1", "grpc", "invalid"): 1,
        }
        (listed,) = httpx.get(f"{url}/v2/models/toy/stats").json()["model_stats"]
        assert (listed["inference_stats"]["success"]["count"], listed["inference_stats"]["fail"]["count"]) == (5, 0)
        assert listed["invalid_count"] == 2
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            (message,) = client.get_inference_statistics("toy").model_stats
        assert (message.inference_stats.success.count, message.inference_stats.fail.count) == (5, 0)
        assert not samples(server, catalog.FAILURES)
        sent_bytes = sum(len(answer.content) for answer in answers)
        assert samples(server, catalog.SENT_BYTES)["toy", "1", "http"] >= sent_bytes
        assert samples(server, catalog.ROWS) == {("toy", "1"): 8}
        assert samples(server, catalog.LOADS) == {("toy", "1"): 1}
        assert samples(server, catalog.IN_FLIGHT) == samples(server, catalog.WAITING) == {("toy", "1"): 0}
        assert 0 < samples(server, catalog.FIRST_ANSWER_SECONDS)["toy", "1"] < 5
        for metric in (catalog.REQUEST_SECONDS, catalog.QUEUE_SECONDS, catalog.ENGINE_SECONDS):
            assert sum(distribution(server, metric).counts) == 5
        assert distribution(server, catalog.BATCH_ROWS).total == 8


def test_serves_counters_have_the_status_that_clients_got() -> None:
    refused = [catalog.REQUESTS.of(1, "toy", "1", protocol, "overload") for protocol in ("http", "openai", "grpc")]
    told = [dict(zip(one.metric.labels, one.labels, strict=True)) for one in ingress_samples(refused, "rayloom")]
    # OpenAI's clients take 429 for a full queue.
    assert [labels["status_code"] for labels in told if "status_code" in labels] == ["503", "429", "UNAVAILABLE"]
    assert [labels["error_code"] for labels in told if "error_code" in labels] == ["503", "429", "UNAVAILABLE"]


def test_a_shadow_is_compared_with_what_clients_get(storage: UPath) -> None:
    """Version 2 adds the same to each logit, so it chooses the same."""
    with serving() as server:
        shadow = CandidateConfig(version=version_config(storage, 2), percent=100)
        model = DeployedModel(production=version_config(storage, 1), shadow=shadow)
        server.run(server.endpoint.update(endpoint_config(model)))
        for path, sent in ((INFER, body(rows(3))), ("/v1/models/toy/predict", {"inputs": ["fine", "bad"]})):
            assert httpx.post(f"http://{server.http}{path}", json=sent).status_code == 200
        wait_until(lambda: sum(samples(server, catalog.SHADOW_ROWS).values()) == 5)
        assert samples(server, catalog.SHADOW_ROWS)["toy", "2", "true"] == 5
        assert samples(server, catalog.TRAFFIC_RATIO) == {
            ("toy", "1", "production"): 1.0,
            ("toy", "2", "shadow"): 1.0,
        }


NUMBERS = Numbers(Scale(mean=50.0, std=10.0))
SETS = LabelSets(LABELS)


@dataclass(frozen=True)
class Shadowed:
    """Three versions for a task: the first, one with nearly the same answers, and one with different answers."""

    task: str
    targets: Outputs
    columns: int
    file: Callable[[float], bytes]
    numbers: tuple[float, float, float]
    """What the files of the versions are made of. A file is exported, which takes seconds, so only when a test runs."""


@pytest.mark.parametrize(
    "kind",
    [
        Shadowed("text-regression", NUMBERS, 1, one_column, (0.0, 0.005, 100.0)),
        Shadowed("text-multilabel", SETS, 3, answering, (0.0, 1e-3, 9.0)),
    ],
    ids=lambda kind: kind.task,
)
def test_a_shadow_is_compared_as_its_task_answers(kind: Shadowed, tmp_path: Path) -> None:
    """Compare by natural input, by tensors, and by tensors as classes."""
    storage = UPath(tmp_path)
    signature = Signature(PROCESSOR.inputs, (TensorSpec(OUTPUT, np.dtype(np.float32), (-1, kind.columns)),))
    for number in kind.numbers:
        publish_version(
            storage, "toy", kind.file(number), signature, PROCESSOR, [], task=kind.task, targets=kind.targets
        )
    classes = [{"name": OUTPUT, "parameters": {"classification": 1}}]
    requests = [
        ("/v1/models/toy/predict", {"inputs": ["fine", "bad"]}),
        (INFER, body(rows(3))),
        (INFER, body(rows(1)) | {"outputs": classes}),
    ]
    for version, agrees in ((2, "true"), (3, "false")):
        with serving() as server:
            shadow = CandidateConfig(version=version_config(storage, version), percent=100)
            model = DeployedModel(production=version_config(storage, 1), shadow=shadow)
            server.run(server.endpoint.update(endpoint_config(model)))
            for path, sent in requests:
                assert httpx.post(f"http://{server.http}{path}", json=sent).status_code == 200
            wait_until(lambda server=server: sum(samples(server, catalog.SHADOW_ROWS).values()) == 6)
            assert samples(server, catalog.SHADOW_ROWS)["toy", str(version), agrees] == 6


@pytest.mark.parametrize(
    ("task", "targets", "ours", "theirs", "agree"),
    [
        ("text-multilabel", SETS, {"labels": ["good", "bad"]}, {"labels": ["bad", "good"]}, True),
        ("text-multilabel", SETS, {"labels": ["good"]}, {"labels": ["bad", "good"]}, False),
        ("text-regression", NUMBERS, {"value": 0.0}, {"value": 0.09}, True),  # of a deviation of 10
        ("text-regression", NUMBERS, {"value": 0.0}, {"value": 0.11}, False),
        ("text-regression", NUMBERS, {"value": 1000.0}, {"value": 1009.0}, True),
        ("sentence-embedding", NUMBERS, {"embedding": [1.0, 0.0], "tokens": 3},
         {"embedding": [1.0, 0.001], "tokens": 4}, True),
        ("sentence-embedding", NUMBERS, {"embedding": [1.0, 0.0]}, {"embedding": [0.0, 1.0]}, False),
        ("token-classification", NUMBERS, {"entities": [{"start": 0, "label": "x", "score": 0.9}]},
         {"entities": [{"start": 0, "label": "x", "score": 0.5}]}, True),
        ("token-classification", NUMBERS, {"entities": [{"start": 0, "label": "x", "score": 0.9}]},
         {"entities": []}, False),
        ("token-classification", NUMBERS, {"tags": ["O", "B-x"]}, {"tags": ["B-x", "O"]}, False),
        ("tests.own_task:AboveMean", NUMBERS, {"above": True}, {"above": False}, False),
        ("text-classification", SETS, {"scores": {"a": 0.1}}, {"scores": {"a": 0.9}}, False),
        ("text-classification", SETS, {"label": "a", "scores": {"a": 0.6}}, {"label": "a", "scores": {"a": 0.9}}, True),
    ],
)  # fmt: skip
def test_tasks_say_which_answers_agree(task: str, targets: Outputs, ours: Answer, theirs: Answer, agree: bool) -> None:
    assert find_served_task(task).agrees(ours, theirs, targets) is agree


def test_rows_agree_if_their_first_choices_do(storage: UPath) -> None:
    loaded = load_model(storage, "toy", 1, threads=1)
    loaded.engine.close()
    model = replace(loaded, targets=Classes(["bad", "good"]))
    ours, theirs = (
        InferResponse("toy", version, None, {OUTPUT: np.array(scores, np.float32)})
        for version, scores in (
            ("1", [[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]),
            ("2", [[0.4, 0.6], [0.1, 0.9], [0.0, 1.0]]),
        )
    )
    assert agreeing_rows(ours, model, theirs, model) == (2, 3)
    fewer = replace(theirs, outputs={OUTPUT: np.zeros((2, 2), np.float32)})
    assert agreeing_rows(ours, model, fewer, model) == (0, 2)
    turned = replace(model, targets=Classes(["good", "bad"]))  # a version may have other labels
    assert agreeing_rows(ours, turned, theirs, model) == (1, 3)


def test_rows_without_scores_agree_if_all_outputs_do(storage: UPath) -> None:
    model = load_model(storage, "toy", 1, threads=1)
    model.engine.close()

    def answer(prices: list[float], zones: list[str]) -> InferResponse:
        outputs = {"price": np.array(prices, np.float32), "zone": np.array(zones, object)}
        return InferResponse("toy", "1", None, outputs)

    ours, theirs = answer([100.5, 102.0, 7.0], ["a", "b", "c"]), answer([100.0, 100.0, 7.0], ["a", "b", "d"])
    assert agreeing_rows(ours, model, theirs, model) == (1, 3)
    fewer = replace(ours, outputs={"price": ours.outputs["price"]})
    assert agreeing_rows(fewer, model, theirs, model) == (0, 3)


def test_counting_a_request_takes_half_as_long_as_with_prometheus() -> None:
    """In CPU time, the best of many short rounds: others share the core."""
    traffic, counted = Traffic(), BatchingStatistics()
    registry = CollectorRegistry()
    histograms = [
        Histogram(name, name, ["model"], registry=registry).labels("reviews") for name in ("request", "queue")
    ]
    counters = [Counter(name, name, ["model"], registry=registry).labels("reviews") for name in ("calls", "in", "out")]

    def count_request() -> None:
        counted.request_s.add(0.0123)
        counted.queue_s.add(0.0017)
        traffic.add("reviews", "3", "http", "ok", 300, 200)

    def count_with_prometheus() -> None:
        for histogram, seconds in zip(histograms, (0.0123, 0.0017), strict=True):
            histogram.observe(seconds)
        for counter, count in zip(counters, (1, 300, 200), strict=True):
            counter.inc(count)

    def fastest(count: Callable[[], None]) -> float:
        return min(timeit.repeat(count, number=500, repeat=400, timer=time.thread_time))

    assert fastest(count_request) < 0.5 * fastest(count_with_prometheus)


def test_a_run_publishes_its_newest_figures() -> None:
    published: dict[str, Sample] = {}
    recipe = load_recipe(str(ROOT / "recipes/digits.yaml"), ["train.global_batch_size=64"])
    metrics = RunMetrics(
        lambda samples: published.update({sample.metric.name: sample for sample in samples}),
        "run-1",
        recipe,
        total_steps=90,
        last_commit=lambda: Commit(1000.0, 0.25),
        clock=lambda: 1010.0,
    )
    metrics.ranks([0.1, 0.3])
    steps = [
        StepRecord(
            step=step, epoch=1, loss=2.0 / step, lr=0.1, grad_norm=3.0, samples_per_s=128.0, step_s=0.5,
            data_stall=0.01, memory=MemoryRecord(peak_bytes=4096),
        )
        for step in (1, 2)
    ]  # fmt: skip
    metrics.append(*steps)
    metrics.append(
        EpochRecord.model_validate(
            {
                "epoch": 1,
                "step": 2,
                "train_loss": 1.5,
                "val_loss": math.pi,
                "val_accuracy": 0.5,
                "val_f1": 0.25,
                "samples_per_s": 128.0,
            }
        )
    )
    expected = {
        "step": 2, "steps_planned": 90, "epoch": 1, "loss": 1.0, "learning_rate": 0.1, "gradient_norm": 3.0,
        "samples_per_second": 128.0, "data_stall_ratio": 0.01, "step_seconds": 0.5, "memory_peak_bytes": 4096,
        "val_loss": math.pi, "val_accuracy_ratio": 0.5, "val_metric": 0.25, "report_timestamp_seconds": 1010.0,
        "checkpoint_timestamp_seconds": 1000.0, "checkpoint_seconds": 0.25, "rank_busy_seconds": 0.3,
    }  # fmt: skip
    assert {name: sample.value for name, sample in published.items()} == {
        f"rayloom_train_{name}": value for name, value in expected.items()
    }
    assert published["rayloom_train_val_metric"].labels == ("run-1", "digits", "val_f1")
    assert published["rayloom_train_rank_busy_seconds"].labels == ("run-1", "digits", "1")
