"""A model that several processes share: it answers as it does whole, and comes back when one of them dies."""

import json
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from upath import UPath

from app.data.builtin import BUILTIN
from app.published.weights import load_weights
from tests.engine_contract import TEXTS
from tests.helpers import train_alone, wait_until
from tests.jobs import run_job
from tests.launch import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emptied")]

SPLIT = "serve.tensor_parallel={size: 2, cpus_per_process: 0.25}"
MODEL = "{model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}"
RECIPE = [
    "recipes/reviews.yaml",
    "name=shared",
    "model.factory=app.models.huggingface:sequence_classifier",
    f"model.args={MODEL}",
    "train.max_steps=8",
    "train.workers=1",
    "train.linear_baseline=false",
    "compile.engines=[torch]",
    "compile.batch_sizes=[1, 8]",
]
"""A model of transformers with four heads, learnt from a few batches."""


@pytest.fixture(scope="module")
def trained(cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a training on few reviews, whose version is published."""
    few = tmp_path_factory.mktemp("reviews") / "few.jsonl"
    rows = [{"text": text, "label": label} for text, label in list(BUILTIN["reviews"]())[::29]]
    few.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    recipe, *overrides = RECIPE
    result = train_alone(*overrides, f"data.source={few}", f"storage={cluster['RAYLOOM_STORAGE']}", recipe=recipe)
    published = run_job(cluster, "compile", *RECIPE)
    assert (published["metrics"]["chosen"]["engine"], published["artifacts"]["model"]) == ("torch", "shared/1")
    return result


@pytest.fixture
def endpoint(cluster: dict[str, str], trained: dict[str, Any]) -> str:
    return run_job(cluster, "deploy", *RECIPE, SPLIT)["artifacts"]["http"]


def asked(endpoint: str) -> httpx.Response:
    return httpx.post(f"{endpoint}/v1/models/shared/predict", json={"inputs": TEXTS}, timeout=60)


def scores(response: httpx.Response) -> list[list[float]]:
    return [list(item["scores"].values()) for item in response.raise_for_status().json()["predictions"]]


def test_it_answers_as_the_whole_model_does_and_comes_back_when_a_part_dies(
    cluster: dict[str, str], trained: dict[str, Any], endpoint: str
) -> None:
    whole = load_weights(UPath(trained["artifacts"]["weights"]))
    tensors = {name: torch.from_numpy(array) for name, array in whole.processor.encode(TEXTS).items()}
    expected = whole.model(**tensors).logits.softmax(-1).detach().numpy()
    np.testing.assert_allclose(scores(asked(endpoint)), expected, atol=2e-5)

    there = Cluster(cluster)
    shards = there.processes("ray::ModelShard")
    assert len(shards) == 2
    shards[1].kill()
    assert asked(endpoint).status_code in (200, 503)  # another replica may have been asked
    wait_until(lambda: not shards[0].is_running() and asked(endpoint).status_code == 200)
    np.testing.assert_allclose(scores(asked(endpoint)), expected, atol=2e-5)
    assert len(there.processes("ray::ModelShard")) == 2

    run_job(cluster, "undeploy", *RECIPE)
    wait_until(lambda: not there.processes("ray::ModelShard") and not there.cpus()[0])


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("{size: 3}", "size is 3, and LlamaForSequenceClassification has 4 heads of keys and values: give a divisor"),
        ("{size: 4, cpus_per_process: 8}", "serve.replicas need 32 CPUs, and the cluster has"),
    ],
)
def test_what_cannot_be_sharded_so_is_refused_before_anything_is_started(
    cluster: dict[str, str], trained: dict[str, Any], split: str, words: str
) -> None:
    refused = run_job(cluster, "deploy", *RECIPE, f"serve.tensor_parallel={split}", succeeds=False)
    assert words in refused["error"]
    assert not Cluster(cluster).processes("ray::ModelShard")
