"""Each built-in task beside the oldest ones, and one of one's own: trained, compiled, served and asked over HTTP."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sklearn.metrics import f1_score, matthews_corrcoef, roc_auc_score
from upath import UPath

from app.compile.run import compile_model
from app.config import load_recipe
from app.published.weights import load_weights
from app.repository.repository import Repository
from app.runs import Run, execute
from app.serving.config import DeployedModel, EndpointConfig, VersionConfig
from app.tasks import load_prepared, prepare
from tests.helpers import ROOT, SGD, folder_of, losses, train_alone
from tests.serving import serving

OWN = [
    "task=tests.own_task:AboveMean", "name=own", "train.early_stopping={metric: val_same_side, mode: max}", "tune=null"
]  # fmt: skip
FAST = ["compile.engines=[openvino, onnxruntime]", "compile.batch_sizes=[1, 8]", "compile.precisions=[fp32, int8]"]


@dataclass(frozen=True)
class Task:
    """A recipe with the name of the task's first metric, and the worst value that training may reach."""

    recipe: str
    metric: str
    mode: str
    bound: float
    overrides: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return str(ROOT / f"recipes/{self.recipe}.yaml")


DIABETES = Task("diabetes", "mae", "min", 55.0)
BREAST_CANCER = Task("breast_cancer", "accuracy", "max", 0.93)
FUNCTIONS = Task("functions", "f1", "max", 0.4, ("train.epochs=4",))
FUNCTION_LINES = Task("function_lines", "mae", "min", 6.0, ("train.epochs=9",))
TUMOUR_EXTREMES = Task("tumour_extremes", "f1", "max", 0.88)
TASKS = [
    DIABETES,
    BREAST_CANCER,
    pytest.param(FUNCTIONS, marks=pytest.mark.slow),
    pytest.param(FUNCTION_LINES, marks=pytest.mark.slow),
    TUMOUR_EXTREMES,
    Task("diabetes", "same_side", "max", 0.65, tuple(OWN)),
]


@dataclass(frozen=True)
class Chain:
    """What became of a task."""

    task: Task
    trained: dict[str, Any]
    compiled: dict[str, Any]
    answer: dict[str, Any]
    model: dict[str, Any]


@pytest.fixture(scope="module")
def storage_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The storage of a recipe's runs, so that its data is prepared once."""
    return cache(tmp_path_factory.mktemp)


@pytest.fixture(scope="module", params=TASKS, ids=lambda task: f"{task.recipe}-{task.metric}")
def chain(request: pytest.FixtureRequest, storage_of: Callable[[str], Path]) -> Iterator[Chain]:
    task: Task = request.param
    storage = storage_of(task.recipe)
    overrides = [*task.overrides, f"storage={storage}", "train.workers=1"]
    trained = train_alone(*overrides, recipe=task.path)
    recipe = load_recipe(task.path, [*overrides, *FAST])
    result = execute(Run.start("compile", recipe), compile_model)
    assert result.status == "succeeded", result.error
    manifest = Repository(UPath(storage)).manifest(recipe.name, 1)
    version = VersionConfig.of(str(storage), manifest, recipe.serve)
    config = EndpointConfig(models={recipe.name: DeployedModel(production=version)})
    given = prepare(recipe).validation.split.inputs[0]  # type: ignore[attr-defined]
    with serving() as server:
        server.run(server.endpoint.update(config))
        client = httpx.Client(base_url=f"http://{server.http}")
        (model,) = client.get("/v1/predict").json()
        answer = client.post(f"/v1/models/{recipe.name}/predict", json={"inputs": [given]})
        assert answer.status_code == 200, answer.text
        refused = client.post(
            f"/v1/models/{recipe.name}/predict", json={"inputs": {} if isinstance(given, str) else {"age": 1}}
        )
        assert refused.status_code == 400
        yield Chain(task, trained, result.metrics, answer.json()["predictions"][0], model)


def test_the_metric_is_trained_published_and_kept_by_the_gate(chain: Chain) -> None:
    task, reached = chain.task, chain.trained["metrics"][f"val_{chain.task.metric}"]
    assert reached <= task.bound if task.mode == "min" else reached >= task.bound
    score = chain.compiled["accuracy"]["score"]
    assert (score["metric"], score["mode"]) == (task.metric, task.mode)
    assert score["value"] == pytest.approx(reached, rel=0.02)
    assert {record["precision"] for record in chain.compiled["variants"]} >= {"fp32", "int8"}


def test_predict_answers_in_the_words_of_the_task(chain: Chain) -> None:
    answer, labels = chain.answer, chain.model["labels"]
    match chain.task.recipe, chain.task.metric:
        case "diabetes", "mae":
            assert 25 < answer["value"] < 346
            assert chain.model["input"] == "row"
            assert "bmi" in chain.model["columns"]
        case "function_lines", _:
            assert 0 < answer["value"] < 41
            assert chain.model["input"] == "text"
        case _, "accuracy":
            assert answer["label"] in labels == ["benign", "malignant"]
            assert sum(answer["scores"].values()) == pytest.approx(1.0, abs=1e-4)
        case _, "f1":
            assert set(answer["labels"]) == {label for label in labels if answer["scores"][label] >= 0.5}
        case _:
            assert answer == {"above": answer["above"]}


@pytest.mark.parametrize(
    "task",
    [
        BREAST_CANCER,
        *(
            pytest.param(task, marks=pytest.mark.slow)
            for task in (DIABETES, FUNCTIONS, FUNCTION_LINES, TUMOUR_EXTREMES)
        ),
    ],
    ids=lambda task: task.recipe,
)
def test_two_ranks_train_and_validate_as_one(task: Task, storage_of: Callable[[str], Path]) -> None:
    plain = [*SGD, "train.precision=fp32", "train.optimizer.lr=0.02", f"storage={storage_of(task.recipe)}"]
    if task.recipe == "functions":  # each rank draws a dropout of its own
        plain += ["model.args.dropout=0.0", "model.args.embedding_dropout=0.0"]
    one = train_alone(*plain, recipe=task.path)
    two = train_alone(*plain, "train.workers=2", "train.plan={zero_stage: 1}", processes=2, recipe=task.path)
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    for name in (name for name in one["metrics"] if name.startswith("val_") and one["metrics"][name] is not None):
        assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_metrics_of_libraries_are_those_of_the_whole_split_on_any_number_of_ranks(tmp_path: Path) -> None:
    keys = ["task=tests.judged_digits:JudgedDigits", "train.early_stopping={metric: val_auroc, mode: max}", "tune=null"]
    keys += [*SGD, "data.validation_fraction=0.194", f"storage={tmp_path}"]
    one, two = train_alone(*keys, "train.workers=1"), train_alone(*keys, processes=2)
    data = load_prepared(load_recipe(folder_of(two) / "config.yaml"), UPath(folder_of(two) / "data"))
    assert len(data.validation) % 2 == 1, "the shares are uneven"
    batch = data.validation.batch(range(len(data.validation)))
    model = load_weights(UPath(two["artifacts"]["weights"])).model.eval()
    with torch.no_grad():
        outputs = model(**{name: torch.from_numpy(values) for name, values in batch.inputs.items()})
    found, metrics = outputs.argmax(-1), two["metrics"]
    assert metrics["val_f1"] == pytest.approx(f1_score(batch.targets, found, average="macro"), abs=1e-6)
    assert metrics["val_matthews"] == pytest.approx(matthews_corrcoef(batch.targets, found), abs=1e-9)
    expected = roc_auc_score(batch.targets, outputs.softmax(-1), multi_class="ovr")
    assert metrics["val_auroc"] == pytest.approx(expected, abs=1e-6)
    for name in ("val_f1", "val_matthews", "val_auroc"):
        assert metrics[name] == pytest.approx(one["metrics"][name], rel=1e-4), name
