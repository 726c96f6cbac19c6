"""A cascade as an endpoint serves it: calibrated on what was published, asked over HTTP and gRPC."""

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from upath import UPath

from app.config import DataConfig, ImageConfig, load_recipe
from app.data.images import ImageProcessor, encode_png
from app.data.labelled import Split
from app.data.targets import Classes
from app.data.text import TextProcessor
from app.engines.base import PooledEngine, Signature
from app.published.loaded import LoadedModel
from app.repository.manifest import Manifest
from app.serving.batching.scheduler import BatchingPolicy
from app.serving.cascade.build import calibrate_versions
from app.serving.cascade.rule import CascadeRule, max_probability
from app.serving.cascade.served import ServedCascade
from app.serving.cascade.stages import require_alike
from app.serving.config import Cascade, DeployedModel, EndpointConfig, VersionConfig
from app.serving.deployment import deployed_model
from app.serving.model.served import ServedModel
from app.serving.protocol.infer import InferRequest, RequestParameters
from app.serving.rollout import Rollout
from app.tasks import find_served_task
from app.tensors import OUTPUT, Tensor, Tensors, TensorSpec
from tests.cascades import LEANING, publish_stages
from tests.engine_contract import PROCESSOR, SIGNATURE, TEXTS, exported, rows
from tests.helpers import ROOT
from tests.publishing import CARD
from tests.serving import Server, serving
from tests.toy import LABELS, asked, body, endpoint_config, publish_version, version_config
from tests.wording import refused

REVIEWS = ROOT / "recipes/reviews.yaml"
POLICY = BatchingPolicy(max_batch_size=64)
PIXEL = ImageConfig(size=1, channels=1)


class Brightness(PooledEngine[None]):
    """Tells bright pixels from dark ones, and all between ``blind`` and its opposite wrongly, at leisure."""

    name, version = "brightness", "1"

    def __init__(self, blind: float, work: int) -> None:
        outputs = (TensorSpec(OUTPUT, np.dtype(np.float32), (-1, 2)),)
        super().__init__(Signature(ImageProcessor(PIXEL).inputs, outputs), [None])
        self.blind, self.work = blind, work
        self.began, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.sizes: set[int] = set()

    def _run(self, member: None, inputs: Tensors) -> Tensors:
        self.sizes.add(len(inputs["pixel_values"]))
        self.began.set()
        self.may_end.wait()
        np.linalg.inv(np.eye(self.work))
        pixels = inputs["pixel_values"].reshape(-1)
        seen = np.where(np.abs(pixels) < self.blind, -pixels, pixels)
        return {OUTPUT: np.stack([-5 * seen, 5 * seen], axis=1)}


def brightness(name: str, blind: float = 0.0, work: int = 1, **changed: Any) -> LoadedModel:
    engine = Brightness(blind, work)
    manifest = Manifest(
        **{
            **dict(CARD),
            "inputs": tuple(map(Tensor.of, engine.signature.inputs)),
            "name": name,
            "version": 1,
            "created": datetime.now(UTC),
            "size_bytes": 1,
            "files": {"model.onnx": name, "answers.npz": name, "labels.json": "a", "image.json": "b"},
            **changed,
        }
    )
    task = find_served_task("image-classification")
    return LoadedModel(manifest, engine, task, ImageProcessor(PIXEL), Classes(["dark", "bright"]))


def rule_of(threshold: float) -> CascadeRule:
    return CascadeRule(
        thresholds=(threshold,),
        accuracy_floor=0.99,
        confidence=0.95,
        rows=1000,
        expected_accuracy=1.0,
        expected_shares=(0.5, 0.5),
        expected_compute=0.6,
    )


def test_versions_are_calibrated_by_what_each_is_right_in_and_takes() -> None:
    levels = np.repeat(np.arange(256, dtype=np.uint8), 4)
    split = Split([encode_png(np.full((1, 1), level)) for level in levels], (levels >= 128).astype(int).tolist())
    models, policies = [brightness("small", 0.3, 1), brightness("large", 0.0, 200)], [BatchingPolicy(16)] * 2
    rule = calibrate_versions(models, policies, split, 0.99)
    assert rule.rows == 1024
    assert rule.expected_shares == pytest.approx((0.7, 0.3), abs=0.02)
    assert rule.expected_accuracy == 1.0
    assert 0.3 < rule.expected_compute < 0.9
    assert [max(cast("Brightness", model.engine).sizes) for model in models] == [16, 16]


@pytest.mark.parametrize(
    "small",
    [
        brightness("small", inputs=(Tensor(name="input_ids", dtype="int64", shape=(-1, -1)),)),
        replace(brightness("small"), targets=Classes(["bright", "dark"])),
        brightness("small", lineage=CARD.lineage.model_copy(update={"data_fingerprint": "e"})),
    ],
)
def test_stages_that_are_not_alike_are_refused(small: LoadedModel) -> None:
    with refused("versions.differ", "serve.cascade.before"):
        require_alike([small, brightness("large")])


def test_a_stage_gets_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left_s: list[float | None] = []

    async def scenario() -> None:
        small = ServedModel(brightness("small", work=500), POLICY)  # takes some milliseconds
        large = ServedModel(brightness("large"), POLICY)
        cascade = ServedCascade([small, large], rule_of(1.0))
        engine = large.model.engine
        assert isinstance(engine, Brightness)
        engine.may_end.clear()
        pixels = {"pixel_values": np.ones((1, 1, 1, 1), np.float32)}
        busy = asyncio.create_task(large.run(pixels))
        await asyncio.to_thread(engine.began.wait)
        infer = large.batcher.infer

        async def infer_late(tensors: Tensors, *, priority: int, timeout_s: float | None) -> Tensors:
            left_s.append(timeout_s)
            return await infer(tensors, priority=priority, timeout_s=0.01)

        monkeypatch.setattr(large.batcher, "infer", infer_late)
        with refused("deadline"):
            await cascade.infer(InferRequest("large", None, None, pixels, parameters=RequestParameters(timeout_s=600)))
        assert left_s[0] is not None
        assert 0 < left_s[0] < 600, "less than was given"
        engine.may_end.set()
        await busy
        _, asked_first = Rollout("large", large, None, None, cascade, random.Random()).statistics
        assert (asked_first.name, asked_first.inference_stats.success.count) == ("large/small", 1)
        assert large.statistics.inference_stats.fail.count == 1

    asyncio.run(scenario())


def test_a_stage_is_closed_only_after_rows_that_are_on_their_way_to_it() -> None:
    async def scenario() -> None:
        small, large = (ServedModel(brightness(name), POLICY) for name in ("small", "large"))
        cascade = ServedCascade([small, large], rule_of(1.0))
        engine = small.model.engine
        assert isinstance(engine, Brightness)
        engine.may_end.clear()
        pixels = {"pixel_values": np.ones((1, 1, 1, 1), np.float32)}
        request = asyncio.create_task(cascade.infer(InferRequest("large", None, None, pixels)))
        await asyncio.to_thread(engine.began.wait)
        closing = [asyncio.create_task(stage.close()) for stage in (large, small)]
        await asyncio.sleep(0)
        engine.may_end.set()
        assert (await request).parameters == {"stage": "1"}
        await asyncio.gather(*closing)

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    """With 'tiny' and 'toy', and 'foreign', which reads texts in its own way."""
    folder = publish_stages(UPath(tmp_path_factory.mktemp("cascade")))
    foreign = TextProcessor.fit(TEXTS[:2], DataConfig(source="-", buckets=[8, 16, 32]))
    publish_version(folder, "foreign", exported(), SIGNATURE, foreign, LABELS)
    return folder


def config(large: VersionConfig, small: VersionConfig, threshold: float) -> EndpointConfig:
    model = DeployedModel(production=large, cascade=Cascade(before=(small,), rule=rule_of(threshold)))
    return endpoint_config(model)


@pytest.fixture(scope="module")
def server(storage: UPath) -> Iterator[Server]:
    """Of 'tiny' before 'toy', with a threshold that half of eight rows reach."""
    with serving() as started:
        large, small = version_config(storage, 1, "toy"), version_config(storage, 1, "tiny")
        started.run(started.endpoint.update(config(large, small, 1.0)))
        confidences = np.sort(max_probability(stage(started, 0, rows(8))))
        started.run(started.endpoint.update(config(large, small, float(confidences[3:5].mean()))))
        yield started


def stage(server: Server, place: int, tensors: Tensors) -> NDArray[np.float32]:
    """What a stage answers, by its place."""
    logits: NDArray[np.float32] = server.endpoint.find("toy").model.engine.infer(tensors)[OUTPUT]
    return logits - (1 - place) * LEANING


def test_each_row_is_answered_by_the_stage_that_the_response_names(server: Server) -> None:
    tensors, client = rows(8), tritonclient.http.InferenceServerClient(server.http)
    before = [statistic["inference_count"] for statistic in client.get_inference_statistics("toy")["model_stats"]]
    answer = client.infer("toy", asked(tritonclient.http, tensors))
    stages = list(map(int, answer.get_response()["parameters"]["stage"].split(",")))
    assert sorted(stages) == [0] * 4 + [1] * 4
    expected = np.stack([stage(server, place, tensors) for place in (0, 1)])[stages, range(8)]
    assert np.allclose(answer.as_numpy(OUTPUT), expected, atol=1e-4)
    after = client.get_inference_statistics()["model_stats"]
    assert [item["name"] for item in after] == ["toy", "toy/tiny"]
    assert [statistics["inference_count"] - count for statistics, count in zip(after, before, strict=True)] == [4, 8]

    over_grpc = tritonclient.grpc.InferenceServerClient(server.grpc).infer("toy", asked(tritonclient.grpc, tensors))
    assert over_grpc.get_response().parameters["stage"].string_param == ",".join(map(str, stages))

    alone = client.infer("toy", asked(tritonclient.http, tensors), model_version="1")
    assert "parameters" not in alone.get_response()
    assert np.allclose(alone.as_numpy(OUTPUT), stage(server, 1, tensors), atol=1e-4)


def test_natural_input_gets_labels_and_their_stage(server: Server) -> None:
    def predicted(given: object) -> list[dict[str, Any]]:
        answer = httpx.post(f"http://{server.http}/v1/models/toy/predict", json={"inputs": given})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["predictions"])

    together = predicted(TEXTS[:4])
    assert {item["stage"] for item in together} <= {0, 1}
    for text, answer in zip(TEXTS[:4], together, strict=True):
        place = answer["stage"]
        logits = stage(server, place, PROCESSOR.encode([text]))
        assert answer["label"] == LABELS[int(logits.argmax())]
        assert [item["stage"] for item in predicted(text)] == [place]


def test_a_single_model_says_nothing_of_stages(storage: UPath) -> None:
    with serving() as server:
        alone = EndpointConfig(models={"toy": DeployedModel(production=version_config(storage, 1, "toy"))})
        server.run(server.endpoint.update(alone))
        answer = httpx.post(f"http://{server.http}/v1/models/toy/predict", json={"inputs": "good"})
        assert set(answer.json()["predictions"][0]) == {"label", "scores"}


def test_stages_that_read_texts_differently_answer_texts_but_no_tensors(storage: UPath) -> None:
    with serving() as server:
        server.run(
            server.endpoint.update(
                config(version_config(storage, 1, "toy"), version_config(storage, 1, "foreign"), 1.0)
            )
        )
        refused = httpx.post(f"http://{server.http}/v2/models/toy/infer", json=body(rows(1)))
        assert (refused.status_code, "ask /v1/models/toy/predict" in refused.json()["error"]) == (400, True)
        answer = httpx.post(f"http://{server.http}/v1/models/toy/predict", json={"inputs": TEXTS[:2]})
        assert [item["stage"] for item in answer.json()["predictions"]] == [1, 1]


def test_a_large_stage_over_its_queue_limit_refuses_the_request(storage: UPath) -> None:
    answers: list[httpx.Response] = []

    def ask(address: str) -> None:
        answers.append(httpx.post(f"http://{address}/v2/models/toy/infer", json=body(rows(64, 32)), timeout=60))

    with serving() as server:
        large = version_config(storage, 1, "toy", max_batch_size=1, queue_limit=1)
        server.run(server.endpoint.update(config(large, version_config(storage, 1, "tiny"), 1.0)))
        for _ in range(5):
            with ThreadPoolExecutor(12) as pool:
                list(pool.map(lambda _: ask(server.http), range(12)))
            if any(answer.status_code == 503 for answer in answers):
                break  # a busy machine may send one after another
    assert {answer.status_code for answer in answers} == {200, 503}
    refused = [answer for answer in answers if answer.status_code == 503]
    assert all("wait already" in item.json()["error"] and int(item.headers["retry-after"]) >= 1 for item in refused)


def test_a_cascade_is_planned_from_a_recipe_and_what_is_published(storage: UPath) -> None:
    def planned(before: str) -> DeployedModel:
        cascade = f"serve.cascade={{before: [{before}], accuracy_floor: 0.8}}"
        return deployed_model(load_recipe(REVIEWS, ["name=toy", cascade, "serve.queue_limit=7"]), storage)

    model = planned("tiny")
    assert model.cascade is not None
    assert [version.title for version in model.versions] == ["toy/1", "tiny/1"]
    assert {version.policy.queue_limit for version in model.versions} == {7}
    assert planned("tiny/1").versions == model.versions
    assert (model.cascade.rule.rows, model.cascade.rule.accuracy_floor) == (32, 0.8)
    with refused("versions.equal", "serve.cascade.before"):
        planned("toy")
    with refused("version.unknown"):
        planned("toy/7")
