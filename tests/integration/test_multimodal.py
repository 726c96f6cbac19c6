"""Records of a text and a picture, of which some lack one: trained on ranks, compiled, served and asked over HTTP."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner
from upath import UPath

from app.cli.main import app
from app.compile.run import compile_model
from app.config import load_recipe
from app.repository.repository import Repository
from app.runs import Run, execute
from app.serving.config import DeployedModel, EndpointConfig, VersionConfig
from app.tasks import prepare
from tests.helpers import ROOT, SGD, folder_of, losses, train_alone
from tests.serving import serving
from tests.wavs import SOUND_FIELDS, tone, wav, write_sounds

RECIPE = str(ROOT / "recipes/digit_halves.yaml")
FAST = ["compile.engines=[openvino, onnxruntime]", "compile.batch_sizes=[1, 8]", "compile.precisions=[fp32, int8]"]
PLAIN = [
    *("model.args.dropout=0.0", "model.args.encoders.words.args.dropout=0.0"),
    *("model.args.encoders.words.args.embedding_dropout=0.0", "train.precision=fp32", "train.optimizer.lr=0.05"),
]
"""Each rank draws a dropout of its own."""


@dataclass(frozen=True)
class Chain:
    """A trained model that is compiled and served, and rows of its validation split."""

    trained: dict[str, Any]
    compiled: dict[str, Any]
    client: httpx.Client
    whole: dict[str, str]
    """A record with both fields."""
    data: Any

    def predict(self, *inputs: Any) -> httpx.Response:
        return self.client.post("/v1/models/digit_halves/predict", json={"inputs": list(inputs)})

    def label(self, record: dict[str, str]) -> str:
        answer = self.predict(record)
        assert answer.status_code == 200, answer.text
        label: str = answer.json()["predictions"][0]["label"]
        return label


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    storage = tmp_path_factory.mktemp("storage")
    overrides = [f"storage={storage}", "train.workers=1", "train.epochs=6", "tune=null"]
    trained = train_alone(*overrides, recipe=RECIPE)
    recipe = load_recipe(RECIPE, [*overrides, *FAST])
    result = execute(Run.start("compile", recipe), compile_model)
    assert result.status == "succeeded", result.error
    manifest = Repository(UPath(storage)).manifest(recipe.name, 1)
    version = VersionConfig.of(str(storage), manifest, recipe.serve)
    data: Any = prepare(recipe)
    whole = next(sent(item) for item in data.validation.split.inputs if len(item) == 2)
    with serving() as server:
        server.run(server.endpoint.update(EndpointConfig(models={recipe.name: DeployedModel(production=version)})))
        with httpx.Client(base_url=f"http://{server.http}") as client:
            yield Chain(trained, result.metrics, client, whole, data)


def sent(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record as a request sends it, with its picture in base64."""
    return {name: base64.b64encode(value).decode() if name == "picture" else value for name, value in record.items()}


@pytest.mark.slow
def test_both_fields_tell_more_than_one(chain: Chain) -> None:
    assert chain.trained["metrics"]["val_accuracy"] > 0.7
    inputs = list(map(sent, chain.data.validation.split.inputs))
    labels = [chain.data.labels[index] for index in chain.data.validation.split.classes]
    rows = [(record, label) for record, label in zip(inputs, labels, strict=True) if len(record) == 2]

    def accuracy(*fields: str) -> float:
        asked = chain.predict(*({name: record[name] for name in fields} for record, _ in rows)).json()["predictions"]
        return float(np.mean([answer["label"] == label for answer, (_, label) in zip(asked, rows, strict=True)]))

    assert accuracy("words", "picture") > max(accuracy("words"), accuracy("picture")) > 0.5


@pytest.mark.slow
def test_every_variant_passes_the_gates(chain: Chain) -> None:
    score = chain.compiled["accuracy"]["score"]
    assert score["value"] == pytest.approx(chain.trained["metrics"]["val_accuracy"], abs=0.02)
    passed = {record["precision"] for record in chain.compiled["variants"] if record["passed"]}
    assert passed >= {"fp32", "int8"}
    evaluation = json.loads((folder_of(chain.trained) / "evaluation.json").read_text(encoding="utf-8"))
    shown = evaluation["worst"]
    assert any(sample["text"] and sample["text"].startswith("words: ") for sample in shown)
    assert any(sample["png_base64"] for sample in shown)
    assert not any("picture" in (sample["text"] or "") for sample in shown), "a file in base64 is no text"


@pytest.mark.slow
def test_predict_takes_records_with_any_of_the_fields(chain: Chain) -> None:
    (model,) = chain.client.get("/v1/predict").json()
    assert (model["input"], model["columns"]) == ("record", ["words", "picture"])
    parts = [chain.whole, {"words": chain.whole["words"]}, {"picture": chain.whole["picture"], "words": None}]
    together = chain.predict(*parts).json()["predictions"]
    assert [answer["label"] for answer in together] == [chain.label(part) for part in parts]
    assert all(sum(answer["scores"].values()) == pytest.approx(1.0, abs=1e-4) for answer in together)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"text": "a"}, "a record has the field 'text': expected words, picture"),
        ({}, "a record has none of its fields: expected at least one of words, picture"),
        ({"picture": "###"}, "field 'picture' is not base64"),
        ({"picture": base64.b64encode(b"no picture").decode()}, "field 'picture': an image of 10 bytes cannot be read"),
        ("white", "an input is no object: expected an object with some of its fields"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused(chain: Chain, given: Any, words: str) -> None:
    answer = chain.predict(given)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


@pytest.mark.slow
def test_the_command_sends_the_fields_of_a_record(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "half.png").write_bytes(base64.b64decode(chain.whole["picture"]))
    command = ["predict", "digit_halves", "--endpoint", str(chain.client.base_url).rstrip("/")]
    fields = ["--field", f"words={chain.whole['words']}", "--field", f"picture=@{tmp_path}/half.png"]
    done = CliRunner().invoke(app, [*command, *fields])
    assert done.output.split()[0] == chain.label(chain.whole)
    for given, words in (
        ([], "give inputs of one kind, or the fields of one record with --field NAME=VALUE"),
        (["white", *fields], "give inputs of one kind, or the fields of one record"),
        (["--field", "words"], "--field words: expected NAME=VALUE, or NAME=@FILE"),
        (["--field", "picture=@none.png"], "'none.png' cannot be read"),
    ):
        assert words in str(CliRunner().invoke(app, [*command, *given]).exception)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_ranks_train_and_validate_as_one(stage: int, tmp_path: Path) -> None:
    """An encoder that a step leaves out has a gradient of zeros at every stage, and not that of an earlier step."""
    plain = [*SGD, *PLAIN, f"storage={tmp_path}", "tune=null"]
    one = train_alone(*plain, "train.plan={zero_stage: 0}", recipe=RECIPE)
    two = train_alone(*plain, f"train.plan={{zero_stage: {stage}}}", processes=2, recipe=RECIPE)
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    for name in ("val_loss", "val_accuracy"):
        assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-4)


@pytest.mark.slow
def test_a_recording_is_a_field_from_training_to_predict(tmp_path: Path) -> None:
    write_sounds(tmp_path, count=96)
    text = {"factory": "app.models.text:encoder_classifier", "args": {"layers": 1, "width": 8, "heads": 2}}
    encoders = {"title": text, "sound": {"factory": "app.models.audio:spectrogram_cnn", "args": {"width": 8}}}
    tree = {
        "name": "sounds",
        "task": "multimodal-classification",
        "storage": str(tmp_path / "storage"),
        "data": {
            "source": str(tmp_path / "sounds.csv"),
            "columns": {"fields": SOUND_FIELDS},
            "audio": {"seconds": 0.25},
            "buckets": [8],
            "validation_fraction": 0.25,
        },
        "model": {"factory": "app.models.multimodal:late_fusion", "args": {"width": 16, "encoders": encoders}},
        "train": {"global_batch_size": 8, "epochs": 6, "workers": 1, "optimizer": {"name": "adamw", "lr": 0.01}},
        "compile": {"engines": ["onnxruntime"], "batch_sizes": [1, 8], "precisions": ["fp32"]},
    }
    file = tmp_path / "sounds.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    train_alone(recipe=str(file))
    recipe = load_recipe(str(file))
    result = execute(Run.start("compile", recipe), compile_model)
    assert result.status == "succeeded", result.error
    version = VersionConfig.of(
        recipe.storage or "", Repository(UPath(recipe.storage)).manifest(recipe.name, 1), recipe.serve
    )
    with serving() as server:
        server.run(server.endpoint.update(EndpointConfig(models={recipe.name: DeployedModel(production=version)})))
        url = f"http://{server.http}/v1/models/{recipe.name}/predict"
        sounds = [base64.b64encode(wav(tone(frequency, seed=500))).decode() for frequency in (300, 3000)]
        answer = httpx.post(url, json={"inputs": [{"sound": sound} for sound in sounds]}, timeout=30)
        refused = httpx.post(url, json={"inputs": {"sound": "bm8gd2F2"}}, timeout=30)
    assert [one["label"] for one in answer.json()["predictions"]] == ["low", "high"]
    assert (refused.status_code, "field 'sound': a recording of 6 bytes cannot be read" in refused.text) == (400, True)
