"""Models that are loaded at their first request: within a budget, the one asked longest ago let go, each answered."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from upath import UPath

from app.config import load_recipe
from app.repository.repository import Repository
from app.serving.config import DeployedModel, EndpointConfig
from app.serving.deployment import deployed_model
from tests.engine_contract import PROCESSOR, SIGNATURE, TEXTS, rows
from tests.helpers import ROOT
from tests.serving import Server, serving
from tests.toy import LABELS, answering, asked, body, expected, is_right, publish_version, version_config
from tests.wording import refused

MODELS, KEPT = 12, 3


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    """With models m0, m1, …, of which each adds its number to the logits, and ``broken``, whose file is no model."""
    folder = UPath(tmp_path_factory.mktemp("on_demand"))
    for number in range(MODELS):
        publish_version(folder, f"m{number}", answering(number), SIGNATURE, PROCESSOR, LABELS)
    publish_version(folder, "broken", b"no model", SIGNATURE, PROCESSOR, LABELS)
    return folder


def config_of(storage: UPath, *names: str, kept: int = KEPT) -> EndpointConfig:
    """Keep ``kept`` models loaded, by the sizes of their files."""
    sizes = {name: Repository(storage).manifest(name, 1).size_bytes for name in names}
    budget = kept * max(sizes.values())
    return EndpointConfig(
        models={
            name: DeployedModel(
                production=version_config(storage, 1, name).model_copy(update={"size_bytes": size}),
                on_demand_bytes=budget,
            )
            for name, size in sizes.items()
        }
    )


@pytest.fixture
def server(storage: UPath) -> Iterator[Server]:
    with serving() as started:
        names = [f"m{number}" for number in range(MODELS)]
        started.run(started.endpoint.update(config_of(storage, *names, "broken")))
        yield started
        started.run(started.endpoint.update(EndpointConfig()))
        started.run(started.endpoint.wait_closed())


def ask(server: Server, number: int) -> httpx.Response:
    return httpx.post(f"http://{server.http}/v2/models/m{number}/infer", json=body(rows(2)), timeout=60)


def loaded(server: Server) -> set[str]:
    index = httpx.post(f"http://{server.http}/v2/repository/index").json()
    return {model["name"] for model in index if model["state"] == "READY"}


def test_each_model_is_loaded_by_its_first_request_and_the_one_asked_longest_ago_is_let_go(server: Server) -> None:
    assert loaded(server) == set()
    assert len(httpx.post(f"http://{server.http}/v2/repository/index").json()) == MODELS + 1
    for number in range(MODELS):
        assert is_right(ask(server, number).json(), expected(rows(2), number))
    assert loaded(server) == {"m9", "m10", "m11"}
    assert ask(server, 9).is_success
    assert ask(server, 0).is_success
    assert loaded(server) == {"m9", "m11", "m0"}


def test_all_ways_in_load_it(server: Server) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        answer = client.infer("m1", asked(tritonclient.grpc, rows(2)))
        assert np.allclose(answer.as_numpy("logits"), expected(rows(2), 1), atol=1e-4)
        assert client.get_model_metadata("m2").name == "m2"
        assert client.is_model_ready("m3")
        client.load_model("m3")
    predicted = httpx.post(f"http://{server.http}/v1/models/m4/predict", json={"inputs": TEXTS[:2]})
    assert predicted.json()["model_name"] == "m4"
    assert httpx.get(f"http://{server.http}/v2/models/m5/config").json()["name"] == "m5"
    assert loaded(server) == {"m3", "m4", "m5"}


def test_many_clients_of_many_models_are_all_answered_right(server: Server) -> None:
    numbers = np.random.default_rng(0).integers(0, MODELS, 100).tolist()
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(lambda number: ask(server, number), numbers))
    for number, answer in zip(numbers, answers, strict=True):
        assert answer.status_code == 200, answer.text
        assert is_right(answer.json(), expected(rows(2), number))
    assert len(loaded(server)) <= KEPT


def test_models_that_unload_each_other_are_both_answered(server: Server, storage: UPath) -> None:
    server.run(server.endpoint.update(config_of(storage, "m1", "m2", kept=1)))
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda number: ask(server, number), [1, 2] * 4))
    for number, answer in zip([1, 2] * 4, answers, strict=True):
        assert is_right(answer.json(), expected(rows(2), number))


def test_no_more_requests_wait_for_a_model_than_its_queue_takes(server: Server) -> None:
    limit = server.endpoint.config.models["m1"].production.policy.queue_limit

    async def wait() -> list[BaseException | None]:
        waits = (server.endpoint.load_on_demand("m1") for _ in range(limit + 2))
        return await asyncio.gather(*waits, return_exceptions=True)

    waited = server.run(wait())
    assert waited[:limit] == [None] * limit
    assert [str(error) for error in waited[limit:]] == [f"{limit} requests wait for m1/1 to be loaded: try again"] * 2
    assert ask(server, 1).is_success


def test_one_that_cannot_be_loaded_is_refused_and_the_others_answer(server: Server) -> None:
    for _ in range(2):
        answer = httpx.post(f"http://{server.http}/v2/models/broken/infer", json=body(rows(2)), timeout=60)
        assert answer.status_code == 503
        assert is_right(ask(server, 1).json(), expected(rows(2), 1))
    server.run(server.endpoint.check())


def test_one_whose_files_are_removed_is_refused_until_they_are_back(server: Server, storage: UPath) -> None:
    version = storage / "models/m1/1"
    moved = version.rename(storage / "moved")
    refused = ask(server, 1)
    assert refused.status_code == 503
    assert refused.json()["error"].startswith("model m1/1 cannot be loaded: see the replica's log")
    moved.rename(version)
    assert is_right(ask(server, 1).json(), expected(rows(2), 1))


def test_one_that_is_not_loaded_is_not_called_undeployed(server: Server) -> None:
    answers = [
        httpx.post(f"http://{server.http}/v2/repository/models/m1/unload", json={}),
        httpx.get(f"http://{server.http}/v2/models/m1/versions/9/ready"),
    ]
    assert [(answer.status_code, answer.json()["error"]) for answer in answers] == [
        (400, "model 'm1' cannot be unloaded by a client: run jobs.undeploy"),
        (404, "model 'm1' has no version '9' here: served are 1"),
    ]
    assert loaded(server) == set()


def test_a_deployment_keeps_what_is_loaded_and_closes_what_it_removes(server: Server, storage: UPath) -> None:
    for number in (1, 2):
        ask(server, number)
    before = server.endpoint.find("m2")
    server.run(server.endpoint.update(config_of(storage, "m2", "m3")))
    assert server.endpoint.find("m2") is before
    assert ask(server, 1).status_code == 404
    assert ask(server, 3).is_success
    server.run(server.endpoint.update(config_of(storage, "m2", "m3", kept=1)))
    assert loaded(server) == {"m3"}, "the other no longer fits"


def test_a_model_larger_than_its_budget_and_one_with_a_canary_are_refused(storage: UPath) -> None:
    recipe = load_recipe(
        str(ROOT / "recipes/reviews.yaml"), ["name=m1", "serve.version=1", "serve.on_demand={memory_mb: 1}"]
    )
    assert isinstance(model := deployed_model(recipe, storage), DeployedModel)
    assert model.on_demand_bytes == 2**20
    with refused("keys.contradict", "serve"):
        load_recipe(
            str(ROOT / "recipes/reviews.yaml"),
            ["serve.on_demand={memory_mb: 1}", "serve.canary={version: 2, percent: 10}"],
        )
