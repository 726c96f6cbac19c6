"""Sources of a job's recipe, and the recipe that is sent with the job."""

import io
import shlex
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from upath import UPath

from app.cluster.jobs import Job, JobsApi
from app.cluster.submit import resubmit, submit
from app.config import embedded, load_recipe, title_of
from app.errors import RecipeError
from jobs._runner import main
from jobs.train import train
from tests.helpers import ROOT, result_of

TEXT = (ROOT / "recipes/digits.yaml").read_text(encoding="utf-8")
Sent = Callable[[], list[str]]


class AcceptingClient:
    """A stub of Ray's client whose cluster accepts every job. Each job ends with ``status``."""

    entrypoints: ClassVar[list[str]] = []
    status: ClassVar[str] = "SUCCEEDED"

    def __init__(self, address: str) -> None:
        assert address == "http://127.0.0.1:9"

    def submit_job(self, *, entrypoint: str, **_: Any) -> None:
        self.entrypoints.append(entrypoint)

    async def tail_job_logs(self, submission_id: str) -> AsyncIterator[str]:
        yield f"the log of {submission_id.partition('-')[0]}\n"

    def get_job_info(self, submission_id: str) -> SimpleNamespace:
        return SimpleNamespace(status=self.status, message="its driver returned 1\n(its log again)")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Return the entrypoint of the last submitted job."""
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", AcceptingClient)
    monkeypatch.setattr(AcceptingClient, "entrypoints", [])
    monkeypatch.setattr(JobsApi, "require_access", lambda self: None)
    monkeypatch.setattr(JobsApi, "find", lambda self, submission_id: None)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    return lambda: shlex.split(AcceptingClient.entrypoints[-1])


def test_submit_shows_the_jobs_log_and_fails_if_the_job_fails(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit("train", "recipes/digits.yaml", []) == 0
    assert "submitted" in capsys.readouterr().out.splitlines()[0]
    monkeypatch.setattr(AcceptingClient, "status", "FAILED")
    assert submit("train", "recipes/digits.yaml", []) == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1:] == ["the log of train"]
    assert shown.err.endswith("failed: its driver returned 1\n")


def test_a_recipe_of_the_working_directory_is_sent_by_its_name(sent: Sent) -> None:
    assert submit("train", "recipes/digits.yaml", ["train.epochs=3"]) == 0
    assert sent() == ["python", "-m", "jobs.train", "recipes/digits.yaml", "train.epochs=3"]


@pytest.mark.parametrize("place", ["elsewhere", "ignored", "standard input"])
def test_any_other_recipe_is_checked_and_sent_along(
    place: str, sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    (folder / "jobs").mkdir(parents=True)
    (folder / "jobs/train.py").touch()
    (folder / ".gitignore").write_text("storage/\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    monkeypatch.chdir(folder)
    recipe = {"elsewhere": str(tmp_path / "best.yaml"), "ignored": "storage/best.yaml", "standard input": "-"}[place]
    if recipe == "-":
        monkeypatch.setattr("sys.stdin", io.StringIO(TEXT + "storage: kept\n"))
    else:
        Path(recipe).parent.mkdir(exist_ok=True)
        Path(recipe).write_text(TEXT + "storage: kept\n", encoding="utf-8")
    assert submit("train", recipe, ["train.epochs=3"]) == 0
    *command, carried, epochs, storage = sent()
    assert (command, epochs) == (["python", "-m", "jobs.train"], "train.epochs=3")
    assert storage == f"storage={folder / 'kept'}", "it is relative to the folder of the person, not of the job"
    assert load_recipe(carried, ["storage=null"]) == load_recipe(ROOT / "recipes/digits.yaml")
    assert title_of(carried) == ("standard input" if recipe == "-" else recipe)


def test_the_credentials_of_a_recipe_s_uri_are_not_sent_along(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signed = "https://user:pass@host:9/a%20b.yaml?X-Amz-Signature=sign#part"
    monkeypatch.setattr("app.cluster.submit.read_text", lambda location: TEXT)
    assert submit("train", signed, []) == 0
    assert title_of(sent()[-1]) == "https://host:9/a%20b.yaml"
    assert title_of(f"zip://best.yaml::{signed}") == "zip://best.yaml::https://host:9/a%20b.yaml"
    assert title_of("recipes/why?.yaml") == "recipes/why?.yaml"
    unreachable = "https://user:pass@127.0.0.1:9/best.yaml?X-Amz-Signature=sign"
    assert main("train", train, [unreachable]) == 2
    printed = "".join(capsys.readouterr())
    assert "recipe 'https://127.0.0.1:9/best.yaml' cannot be read" in printed
    assert not [secret for secret in ("user", "pass", "sign") if secret in printed]


def test_what_is_sent_along_is_sent_again_when_the_cluster_was_lost(sent: Sent) -> None:
    carried = embedded(TEXT, "s3://bucket/a b.yaml")
    entrypoint = shlex.join(["python", "-m", "jobs.train", carried, "train.epochs=3"])  # as Ray keeps it
    metadata = {"rayloom_folder": str(ROOT)}
    job = Job(submission_id="train-1", status="RUNNING", entrypoint=entrypoint, start_time=0, metadata=metadata)
    environment = {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9"}
    assert resubmit(job, environment) == "train-1-again"
    assert sent() == ["python", "-m", "jobs.train", carried, "train.epochs=3", "train.resume=latest"]


def test_a_job_reads_its_recipe_from_object_storage(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    bucket = UPath("s3://recipes", use_listings_cache=False)
    bucket.mkdir(exist_ok=True)
    (bucket / "best.yaml").write_text(TEXT, encoding="utf-8")
    assert main("train", train, ["s3://recipes/best.yaml", "data.source=/nowhere.csv"]) == 1
    result = result_of(capsys.readouterr().out)
    assert (result["recipe"], "/nowhere.csv" in result["error"]) == ("digits", True)
    assert main("train", train, ["s3://recipes/worst.yaml"]) == 2
    assert "recipe 's3://recipes/worst.yaml' cannot be read" in result_of(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("foo://bucket/best.yaml", "recipe 'foo://bucket/best.yaml' cannot be read (Unsupported filesystem: 'foo')"),
        (embedded("name: Digits", "/tmp/best.yaml"), "/tmp/best.yaml: name is 'Digits'"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_told_by_its_name(
    recipe: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("train", train, [recipe]) == 2
    assert words in result_of(capsys.readouterr().out)["error"]


def test_a_recipe_too_long_for_a_command_is_refused(tmp_path: Path, sent: Sent) -> None:
    (tmp_path / "long.yaml").write_text(TEXT + "# " + "x" * 70_000, encoding="utf-8")
    with pytest.raises(RecipeError, match="expected 65,536 at most"):
        submit("train", str(tmp_path / "long.yaml"), [])
