"""Files that a recipe names and that a job would not have: the client says so before anything is sent."""

import re
from pathlib import Path

import pytest
from PIL import Image

from app.cluster.jobs import JobsApi
from app.cluster.preflight import require_inputs
from app.cluster.submit import submit
from app.config import Recipe, load_recipe
from app.errors import RecipeError
from tests.helpers import ROOT
from tests.wording import refused

FILE = "data/examples.csv"
TABLE = ["model.factory=app.models.tabular:mlp", "task=tabular-classification"]
KEYS: dict[str, tuple[str, list[str]]] = {
    "data.source": ("digits", [f"data.source={FILE}"]),
    "data.sources.source": ("digits", ["data.source=null", f"data.sources=[{{source: {FILE}}}, {{source: /b.csv}}]"]),
    "data.test_source": ("digits", [f"data.test_source={FILE}", "data.test_fraction=null"]),
    "data.validation_source": (
        "reviews",
        [
            *("data.source=nats://h:1/S?subject=s", f"data.validation_source={FILE}", "data.test_fraction=null"),
            *("data.stream={samples: 99999, labels: [a, b]}", "train.linear_baseline=false", "tune=null"),
            "train.schedule={name: constant, warmup_fraction: 0.0}",
        ],
    ),
    "data.chat.template": ("stdlib_chat", [f"data.chat.template={FILE}"]),
    "model.pretrained": ("stdlib_chat", [f"model.pretrained={FILE}", "data.chat.template=null"]),
    "train.prune.weights": ("digits", [f"train.prune.weights={FILE}"]),
    "train.augment.text.synonyms": ("reviews", [f"train.augment.text.synonyms={FILE}"]),
    "compile.weights": ("digits", [f"compile.weights={FILE}"]),
}
"""A recipe, and what makes the key in it a relative path, by every key that can be one."""


class Sent(Exception):
    """The job passed every check."""


@pytest.fixture(autouse=True)
def running_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is up, whose first question ends the submission."""

    def stop(self: JobsApi) -> None:
        raise Sent

    monkeypatch.setattr(JobsApi, "require_access", stop)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a project with data."""
    folder = tmp_path / "project"
    (folder / FILE).parent.mkdir(parents=True)
    (folder / FILE).write_text("text,label\n1.png,a\n")
    Image.new("L", (2, 2)).save(folder / "data/1.png")
    (folder / "pyproject.toml").touch()
    monkeypatch.chdir(folder)
    return folder


def submitted(*overrides: str, recipe: str = "digits", job: str = "train") -> None:
    submit(job, str(ROOT / f"recipes/{recipe}.yaml"), [*overrides])


def refusal(*overrides: str, recipe: str = "digits") -> str:
    with pytest.raises(RecipeError) as refused:
        submitted(*overrides, recipe=recipe)
    return str(refused.value)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_that_names_an_ignored_file_is_refused_with_the_rule(key: str, project: Path) -> None:
    recipe, overrides = KEYS[key]
    with pytest.raises(Sent):
        submitted(*overrides, recipe=recipe)
    (project / ".gitignore").write_text("# large\ndata/\n*.log\n")
    with refused("path.not_uploaded", key):
        submitted(*overrides, recipe=recipe)
    with pytest.raises(Sent):
        submitted(*(override.replace(FILE, str(project / FILE)) for override in overrides), recipe=recipe)


def test_no_other_key_is_described_as_a_path() -> None:
    described = re.compile(r"\b(path or URI|URI of|a folder|file of)\b")
    sections = Recipe.model_json_schema()["$defs"].values()
    keys = [item for section in sections for item in section.get("properties", {}).items()]
    found = {key for key, told in keys if described.search(told.get("description", ""))}
    # The rows of a table hold the paths of its fields, and MLflow's is a server.
    assert found - {key.rpartition(".")[2] for key in KEYS} == {"kind", "mlflow"}


@pytest.mark.parametrize("job", ["deploy", "undeploy"])
def test_a_job_that_reads_no_data_needs_none(job: str, project: Path) -> None:
    (project / ".gitignore").write_text("data/\n")
    with pytest.raises(Sent):
        submitted(f"data.source={FILE}", job=job)


@pytest.mark.parametrize(
    ("ignore_file", "lines", "rule"),
    [
        (".rayignore", "*.csv", "*.csv"),
        ("data/.gitignore", "*\n!examples.csv", "*"),  # unlike git, Ray takes it for the folder, too
        (".gitignore", "*.csv\n!data/*.csv\nexamples.*", "examples.*"),
        (".gitignore", "*.csv\n!data/*.csv", None),
        (".gitignore", "/examples.csv", None),
    ],
)
def test_each_ignore_file_is_read_as_ray_reads_it(
    ignore_file: str, lines: str, rule: str | None, project: Path
) -> None:
    (project / ignore_file).write_text(lines)
    if rule is None:
        with pytest.raises(Sent):
            submitted(f"data.source={FILE}")
        return
    said = refusal(f"data.source={FILE}")
    assert f"{str(project / ignore_file)!r} excludes" in said
    assert f"by its line {rule!r}" in said


def test_a_gitignore_that_ray_is_told_to_ignore_excludes_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / ".gitignore").write_text("data/\n")
    monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")
    with pytest.raises(Sent):
        submitted(f"data.source={FILE}")


def test_a_folder_of_which_some_files_are_ignored_is_refused(project: Path) -> None:
    for name in ("a/1.png", "a/2.png", "b/1.jpg", "b/.cache/1.png", "b/.2.png"):
        (project / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(project / "pictures" / name)
    (project / ".gitignore").write_text(".cache/\n.2.png\n")
    with pytest.raises(Sent):  # sources do not read hidden files
        submitted("data.source=pictures")
    (project / ".gitignore").write_text("*.png\n")
    said = refusal("data.source=pictures")
    assert "exists here, but 2 of its 3 files are not uploaded" in said
    assert f"excludes {str(project / 'pictures/a/1.png')!r} by its line '*.png'" in said


def test_a_subfolder_of_a_project_says_where_the_file_is(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "recipes").mkdir()
    monkeypatch.chdir(project / "recipes")
    said = refusal(f"data.source={FILE}")
    assert f"is in {str(project)!r}, and only the current folder {str(project / 'recipes')!r} is uploaded" in said
    assert f"submit from {str(project)!r}, or give its absolute path, {str(project / FILE)!r}" in said
    said = refusal(f"data.source=../{FILE}")
    assert "is outside of the current folder" in said
    assert f"give its absolute path, {str(project / FILE)!r}" in said


def test_a_path_that_exists_nowhere_in_the_project_is_left_to_the_job(project: Path) -> None:
    (project.parent / "elsewhere.csv").touch()  # above the project
    for source in ("elsewhere.csv", "nowhere.csv", "builtin:digits", "~/x.csv", "x" * 999):
        with pytest.raises(Sent):
            submitted(f"data.source={source}")


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "recipes").glob("[!g]*.yaml")))
def test_the_data_of_every_recipe_pass_the_look_at_their_first_rows(recipe: str) -> None:
    require_inputs("train", load_recipe(ROOT / f"recipes/{recipe}.yaml"), ROOT, is_local=True)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("reviews", ["data.test_source=/mnt/nodes/test.csv", "data.test_fraction=null"]),
        ("digits", [f"data.source={FILE}", "data.columns={input: text}"]),
        ("reviews", ["model.factory=models_of_the_image.text:make"]),
    ],
    ids=["test data", "pictures of a table", "factory"],
)
def test_what_lies_on_the_nodes_alone_is_left_to_the_job(recipe: str, overrides: list[str], project: Path) -> None:
    (project / FILE).write_text("text,label\n/mnt/nodes/0.png,a\n/mnt/nodes/1.png,b\n", encoding="utf-8")
    with pytest.raises(Sent):
        submitted(*overrides, recipe=recipe)


def test_a_factory_that_is_sent_along_is_looked_at(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(project)
    (project / "my_models.py").write_text("def make(): ...\n", encoding="utf-8")
    for factory in ("my_models:mak", "app.models.text:encoder_clasifier"):
        assert "did you mean" in refusal(f"model.factory={factory}")


def test_a_table_with_words_and_numbers_passes(project: Path) -> None:
    (project / FILE).write_text("age,town,label\n40,K\u00f6ln,a\n,Bonn,b\n", encoding="utf-8")
    with pytest.raises(Sent):
        submitted(f"data.source={FILE}", "data.test_fraction=null", recipe="breast_cancer")


def test_symlinks_within_the_data_do_not_make_the_look_at_them_endless(project: Path) -> None:
    for name in ("first", "second"):
        (project / "data" / name).symlink_to(".")
    with refused("path.not_sendable"):
        submitted("data.source=data")
