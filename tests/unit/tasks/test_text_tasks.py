"""Embeddings and entities through compile and an endpoint, from small models with fresh weights."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from upath import UPath

from app.artifacts import DATA, RECIPE_FILE, WEIGHTS, WEIGHTS_FILE
from app.checksums import write_checksums
from app.compile.run import compile_model
from app.config import dump_recipe, load_recipe
from app.models.factory import build_model
from app.repository.repository import Repository
from app.runs import Run, execute
from app.serving.config import DeployedModel, EndpointConfig, VersionConfig
from app.tasks import prepare
from tests.serving import serving
from tests.unit.data.test_tagging import spans, write_recipe
from tests.unit.tasks.test_embedding import prepared as prepared_pairs

FAST = ["compile.engines=[onnxruntime]", "compile.batch_sizes=[1, 4]", "compile.precisions=[fp32]"]


@contextmanager
def served(path: Path, storage: Path) -> Iterator[tuple[dict[str, Any], httpx.Client]]:
    """Compile a recipe's model with fresh weights. Yield the metrics, and a client of an endpoint that serves it."""
    recipe = load_recipe(str(path), [f"storage={storage}", *FAST])
    data, folder = prepare(recipe), UPath(storage / "runs/train/fresh")
    (folder / WEIGHTS).mkdir(parents=True)
    data.save(folder / DATA)
    torch.manual_seed(0)
    model = build_model(recipe.model, data.facts)
    safetensors.torch.save_file(model.state_dict(), str(folder / WEIGHTS / WEIGHTS_FILE))
    (folder / WEIGHTS / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
    data.save_codec(folder / WEIGHTS)
    write_checksums(folder / WEIGHTS)
    recipe = load_recipe(str(path), [f"storage={storage}", *FAST, f"compile.weights={folder / WEIGHTS}"])
    result = execute(Run.start("compile", recipe), compile_model)
    assert result.status == "succeeded", result.error
    version = VersionConfig.of(str(storage), Repository(UPath(storage)).manifest(recipe.name, 1), recipe.serve)
    with serving() as server:
        server.run(server.endpoint.update(EndpointConfig(models={recipe.name: DeployedModel(production=version)})))
        with httpx.Client(base_url=f"http://{server.http}", timeout=30) as client:
            yield result.metrics, client


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_vectors_are_compiled_by_their_cosine_and_answer_openais_requests(tmp_path: Path) -> None:
    prepared_pairs(tmp_path)
    with served(tmp_path / "recipe.yaml", tmp_path / "storage") as (compiled, client):
        (variant,) = [record for record in compiled["variants"] if record["passed"]]
        assert variant["cosine"] == pytest.approx(1.0, abs=1e-5)
        assert variant["score"]["metric"] == "recall_at_1"
        texts = ["what is number 3", "it is", "what is the number that is not one of the numbers of this small file"]
        answer = post(client, "/v1/embeddings", model="pairs", input=texts)
        assert (answer["object"], answer["model"]) == ("list", "pairs")
        assert [item["index"] for item in answer["data"]] == [0, 1, 2]
        vectors = np.array([item["embedding"] for item in answer["data"]])
        assert vectors.shape == (3, 8)
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
        one = post(client, "/v1/embeddings", model="pairs", input=texts[1], encoding_format="base64", user="me")
        packed = np.frombuffer(base64.b64decode(one["data"][0]["embedding"]), "<f4")
        assert np.allclose(packed, vectors[1], atol=1e-5)
        assert one["usage"]["prompt_tokens"] == one["usage"]["total_tokens"] < answer["usage"]["total_tokens"]
        natural = post(client, "/v1/models/pairs/predict", inputs=texts[1])["predictions"][0]
        assert np.allclose(natural["embedding"], vectors[1], atol=1e-5)
        for change, status, words in (
            ({"input": [1, 2]}, 400, "input holds tokens: send a text"),
            ({"input": []}, 400, "inputs is an empty list"),
            ({"dimensions": 3}, 400, "has vectors of 8 numbers; leave it out"),
            ({"encoding_format": "hex"}, 400, "encoding_format"),
            ({"truncate": True}, 400, "unknown key 'truncate'"),
            ({"model": "other"}, 404, "is not deployed"),
        ):
            refused = client.post("/v1/embeddings", json={"model": "pairs", "input": "a", **change})
            assert (refused.status_code, words in refused.json()["error"]["message"]) == (status, True), refused.text


def test_texts_of_several_lengths_get_entities_with_their_characters(tmp_path: Path) -> None:
    path = Path(write_recipe(tmp_path, [spans(row) for row in range(30)]))
    with served(path, tmp_path / "storage") as (compiled, client):
        assert compiled["accuracy"]["score"]["metric"] == "entity_f1"
        texts = ["Fly to Rome", "Fly to New York, gate 3, and then on to San Marino, gate 4, and back to Rome, gate 5."]
        answers = post(client, "/v1/models/cities/predict", inputs=[texts[1], texts[0]])["predictions"]
        assert "cut_at" in answers[0]
        assert "cut_at" not in answers[1]
        for text, answer in zip((texts[1], texts[0]), answers, strict=True):
            assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in answer["entities"])
        assert any(answer["entities"] for answer in answers), "fresh weights found no entity: nothing was compared"
        refused = client.post("/v1/embeddings", json={"model": "cities", "input": "a"})
        assert refused.status_code == 400
        assert "answers labels, not vectors" in refused.json()["error"]["message"]
