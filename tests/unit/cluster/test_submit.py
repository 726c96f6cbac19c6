"""Sources of a job's recipe, and the recipe that is sent with the job."""

import asyncio
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import requests
import typer
from ray.exceptions import AuthenticationError
from upath import UPath

import jobs._shards
from app.cli.jobs import resume
from app.cluster.jobs import Job, JobsApi
from app.cluster.preflight import require_stored
from app.cluster.submit import follow_job, resubmit, stop_job, submit
from app.config import embedded, load_job_recipe, load_recipe, title_of
from app.reports.run_folder import RunFolder
from jobs._runner import main
from jobs.train import train
from tests.helpers import ROOT, result_of
from tests.wording import refused

TEXT = (ROOT / "recipes/digits.yaml").read_text(encoding="utf-8")
Sent = Callable[[], list[str]]


class AcceptingClient:
    """A stub of Ray's client whose cluster accepts every job."""

    entrypoints: ClassVar[list[str]] = []
    metadata: ClassVar[dict[str, str]] = {}
    """Of the last job."""

    def __init__(self, address: str) -> None:
        assert address == "http://127.0.0.1:9"

    def submit_job(self, *, entrypoint: str, metadata: dict[str, str], **_: Any) -> None:
        self.entrypoints.append(entrypoint)
        AcceptingClient.metadata = metadata

    async def tail_job_logs(self, submission_id: str) -> AsyncIterator[str]:
        yield f"the log of {submission_id.partition('-')[0]}\n"


class TalkativeClient(AcceptingClient):
    """One whose job has told its result, and whose log Ray does not close."""

    async def tail_job_logs(self, submission_id: str) -> AsyncIterator[str]:
        yield 'epoch 1/1\nRESULT {"job":"train"}\n'
        await asyncio.sleep(3600)


class PausedClient(AcceptingClient):
    """One whose job has saved its state and ended, as an alert or a person has asked."""

    async def tail_job_logs(self, submission_id: str) -> AsyncIterator[str]:
        yield 'RESULT {"job": "train", "run_id": "r", "status": "stopped"}\n'


class InterruptedClient(AcceptingClient):
    """One whose reader presses Ctrl-C."""

    async def tail_job_logs(self, submission_id: str) -> AsyncIterator[str]:
        yield "epoch 1/9\n"
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)


def job(submission_id: str, status: str, **fields: Any) -> Job:
    message = "its driver returned 1, last available logs (truncated to 20,000 chars):\nits log again"
    given = {"entrypoint": "", "start_time": 0, "metadata": {}, "message": message}
    return Job.model_validate({"submission_id": submission_id, "status": status, **given, **fields})


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Return the entrypoint of the last submitted job."""
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", AcceptingClient)
    monkeypatch.setattr(AcceptingClient, "entrypoints", [])
    monkeypatch.setattr(JobsApi, "require_access", lambda self: None)
    monkeypatch.setattr(JobsApi, "find", lambda self, submission_id: job(submission_id, "SUCCEEDED"))
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    return lambda: shlex.split(AcceptingClient.entrypoints[-1])


def test_a_published_model_is_deployed_by_its_name(sent: Sent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert submit("deploy", "dense", ["serve.replicas=2"]) == 0
    assert sent() == ["python", "-m", "jobs.deploy", "dense", "serve.replicas=2"]
    with refused("range.invalid", "serve.replicas"):
        submit("deploy", "dense", ["serve.replicas=two"])
    with refused("override.not_of_model", "train.epochs"):
        submit("deploy", "dense", ["train.epochs=3"])
    with refused("file.unreadable"):
        submit("compile", "dense", [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dense").write_text(TEXT, encoding="utf-8")
    assert load_job_recipe("deploy", "dense").name == "digits", "a file of this name is a recipe"


@pytest.mark.parametrize(("status", "code"), [("SUCCEEDED", 0), ("STOPPED", 1), ("FAILED", 1)])
@pytest.mark.parametrize("lost", [False, True])
def test_submit_shows_the_log_of_a_job_and_returns_its_exit_code(
    status: str, code: int, lost: bool, sent: Sent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(self: JobsApi, submission_id: str) -> Job:
        if lost and not submission_id.endswith("-again"):
            raise httpx.ConnectError("the cluster is gone")
        return job(submission_id, status)

    monkeypatch.setattr(JobsApi, "find", find)
    assert submit("train", "recipes/digits.yaml", []) == code
    shown = capsys.readouterr()
    submitted, *log = shown.out.splitlines()
    assert "submitted" in submitted
    assert log == ["the log of train"] * (2 if lost else 1)
    assert ("the cluster was lost while the job ran\n" in shown.err) is lost
    assert shown.err.endswith("failed: its driver returned 1\n") is (status == "FAILED")
    assert shown.err.endswith("was stopped before its end\n") is (status == "STOPPED")


@pytest.mark.parametrize("exit_code", [137, -9])
def test_a_killed_job_says_what_kills_one(
    exit_code: int, sent: Sent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = job("train-1", "FAILED", driver_exit_code=exit_code)
    monkeypatch.setattr(JobsApi, "find", lambda self, submission_id: killed)
    assert submit("train", "recipes/digits.yaml", []) == 1
    told = capsys.readouterr().err
    assert "failed: it was killed (SIGKILL), as Linux does when a node has no memory left" in told
    assert "submit it again" in told


def test_a_job_that_paused_ends_a_chain_of_commands(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", PausedClient)
    assert submit("train", "recipes/digits.yaml", []) == 1
    assert capsys.readouterr().err.endswith("was paused or stopped before its end: its log says how to resume\n")


def test_a_log_that_cannot_be_shown_does_not_change_the_exit_code(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: AcceptingClient, submission_id: str) -> None:
        raise AuthenticationError("the token is wrong\nset it")

    monkeypatch.setattr(AcceptingClient, "tail_job_logs", refuse)
    assert submit("train", "recipes/digits.yaml", []) == 0
    assert capsys.readouterr().err.endswith("ended: the token is wrong\n")


@pytest.mark.parametrize(
    "error", [requests.ConnectionError("reset\nmore"), AuthenticationError("reset\nmore"), RuntimeError("reset\nmore")]
)
@pytest.mark.parametrize("method", ["__init__", "submit_job"])
def test_an_error_of_rays_client_is_one_sentence(
    error: Exception, method: str, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(AcceptingClient, method, fail)
    with refused("cluster.refuses"):
        submit("train", "recipes/digits.yaml", [])
    lost = job("train-1", "RUNNING", metadata={"rayloom_folder": str(ROOT)})
    with refused("cluster.refuses"):
        resubmit(lost, {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9"})


def test_a_folder_too_large_to_send_is_told_with_its_largest_parts(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Request failed with status code 413: Maximum request body size 104857600 exceeded.")

    monkeypatch.setattr(AcceptingClient, "submit_job", refuse)
    files = [
        ("data/a.bin", 2),
        ("data/b.bin", 1),
        ("weights.bin", 1),
        ("ignored/c.bin", 9),
        ("a.py", 0),
        (".venv/d", 9),
    ]
    for name, size in files:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(size * 2**20))
    (tmp_path / ".gitignore").write_text("ignored/\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with refused("cluster.refuses"):
        submit("train", str(ROOT / "recipes/digits.yaml"), [])


@pytest.mark.parametrize("name", ["caf\udce9.txt", "link", "outside", "pipe", "zeros"])
def test_a_file_that_cannot_be_sent_is_named_unless_it_is_ignored(
    name: str, sent: Sent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outside, project = tmp_path / "caf\udce9", tmp_path / "caf\udce9/project"
    makes: dict[str, Callable[[Path], None]] = {
        "link": lambda path: path.symlink_to("."),
        "outside": lambda path: path.symlink_to(outside / "other"),
        "pipe": os.mkfifo,
        "zeros": lambda path: path.symlink_to("/dev/zero"),
    }
    (outside / "other").mkdir(parents=True)
    (outside / "other/loop").symlink_to(outside / "other")
    (project / ".venv").mkdir(parents=True)
    (project / "itself").symlink_to("itself")
    for folder in (project, project / ".venv"):
        makes.get(name, Path.touch)(folder / name)
    monkeypatch.chdir(project)
    with refused("path.not_sendable"):
        submit("train", str(ROOT / "recipes/digits.yaml"), [])
    Path(".rayignore").write_text(f"/{name[:3]}*\n", encoding="utf-8")
    assert submit("train", str(ROOT / "recipes/digits.yaml"), []) == 0


@pytest.mark.parametrize("place", [".gitignore", "data/.rayignore"])
@pytest.mark.parametrize("content", [b"caf\xe9\n", b"!\n"])
def test_an_ignore_file_that_cannot_be_read_is_named(
    content: bytes, place: str, sent: Sent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / place).write_bytes(content)
    shutil.copy(ROOT / "recipes/digits.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    with refused("ignore_file.invalid") as caught:
        submit("train", "digits.yaml", [])
    assert str(tmp_path / place) in str(caught.value)
    assert not AcceptingClient.entrypoints


def test_submit_ends_when_the_job_does_and_not_when_ray_closes_its_log(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = iter(["RUNNING", "RUNNING", "FAILED"])
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", TalkativeClient)
    monkeypatch.setattr(JobsApi, "find", lambda self, submission_id: job(submission_id, next(statuses)))
    assert submit("train", "recipes/digits.yaml", []) == 1
    assert list(statuses) == []
    assert capsys.readouterr().out.splitlines()[1:] == ["epoch 1/1", 'RESULT {"job":"train"}']


def test_ray_is_imported_with_the_token_of_the_local_cluster(sent: Sent, tmp_path: Path) -> None:
    """Ray reads its settings when it is imported. Only a process of its own has not imported it yet."""
    token = tmp_path / "token"
    code = f"""
import os, sys
import app.cluster.submit as module

class Up:
    def client_environment(self):
        return {{"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9", "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": {str(token)!r}}}

def is_uploaded(file, folder):
    assert "ray" not in sys.modules and os.environ["RAY_AUTH_MODE"] == "token"
    sys.exit(7)

module.read_state, module.is_uploaded = Up, is_uploaded
module.submit("train", "recipes/digits.yaml", [])
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 7, done.stderr.decode()


def test_the_job_is_told_to_print_its_whole_result(sent: Sent) -> None:
    assert submit("train", "recipes/digits.yaml", ["train.epochs=3"], ["--json"]) == 0
    assert sent()[-2:] == ["train.epochs=3", "--json"]


def test_a_recipe_of_the_working_directory_is_sent_by_its_name(sent: Sent) -> None:
    assert submit("train", "recipes/digits.yaml", ["train.epochs=3"]) == 0
    assert sent() == ["python", "-m", "jobs.train", "recipes/digits.yaml", "train.epochs=3"]


@pytest.mark.parametrize("is_repository", [False, True])
@pytest.mark.parametrize("place", ["recipes/best.yaml", "storage.yaml"])
def test_a_recipe_that_ray_uploads_is_sent_by_its_name_in_any_folder(
    place: str, is_repository: bool, sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_repository:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("storage/\nbest.yaml\n!recipes/best.yaml\n", encoding="utf-8")
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    Path(place).write_text(TEXT, encoding="utf-8")
    assert submit("train", place, []) == 0
    assert sent() == ["python", "-m", "jobs.train", place]


@pytest.mark.parametrize("place", ["elsewhere", "ignored", "ignored by Ray", "standard input"])
def test_any_other_recipe_is_checked_and_sent_along(
    place: str, sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / ".gitignore").write_text("storage/\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    monkeypatch.chdir(folder)
    (folder / "runs").mkdir()
    (folder / "runs/.rayignore").write_text("best.yaml\n", encoding="utf-8")
    recipe = {
        "elsewhere": str(tmp_path / "best.yaml"),
        "ignored": "storage/best.yaml",
        "ignored by Ray": "runs/best.yaml",
        "standard input": "-",
    }[place]
    if recipe == "-":
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{TEXT}storage: kept\n".encode())))
    else:
        Path(recipe).parent.mkdir(exist_ok=True)
        Path(recipe).write_text(TEXT + "storage: kept\n", encoding="utf-8")
    assert submit("train", recipe, ["train.epochs=3"]) == 0
    *command, carried, epochs, storage = sent()
    assert (command, epochs) == (["python", "-m", "jobs.train"], "train.epochs=3")
    assert storage == f"storage={folder / 'kept'}", "it is relative to the folder of the person, not of the job"
    assert load_recipe(carried, ["storage=null"]) == load_recipe(ROOT / "recipes/digits.yaml")
    assert title_of(carried) == ("standard input" if recipe == "-" else recipe)


@pytest.mark.parametrize("folder", ["exp #2", "a: b", "[x", 'say "it\'s" – ok'])
def test_a_storage_of_any_name_reaches_the_job(
    folder: str, sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    Path("best.yaml").write_text(TEXT + "storage: kept\n", encoding="utf-8")
    for given, storage in (([], str(tmp_path / folder / "kept")), (["storage=null"], None)):
        assert submit("train", "best.yaml", given) == 0
        *_, recipe, override = sent()
        assert load_recipe(recipe, [override]).storage == storage
    monkeypatch.setattr("app.cli.jobs.train_run", lambda *_: RunFolder(UPath(tmp_path / "run-1")))
    with pytest.raises(typer.Exit):
        resume("run-1", storage="kept")
    *_, override, _ = sent()
    assert load_recipe("best.yaml", [override]).storage == str(tmp_path / folder / "kept")


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
    lost = job("train-1", "RUNNING", entrypoint=entrypoint, metadata={"rayloom_folder": str(ROOT)})
    environment = {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9"}
    assert resubmit(lost, environment) == "train-1-again"
    assert sent() == ["python", "-m", "jobs.train", carried, "train.epochs=3", "train.resume=latest"]
    assert AcceptingClient.metadata["rayloom_lost_job"] == "train-1"


def test_a_lost_job_whose_command_cannot_be_read_is_named() -> None:
    lost = job("train-1", "RUNNING", entrypoint="echo it's", metadata={"rayloom_folder": str(ROOT)})
    with refused("command.unreadable"):
        resubmit(lost, {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9"})


def test_a_job_reads_its_recipe_from_object_storage(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jobs._shards, "connect", lambda: None)  # the data are refused, so no cluster is needed
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
    with refused("recipe.too_long"):
        submit("train", str(tmp_path / "long.yaml"), [])


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_log_and_says_how_to_go_on(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", InterruptedClient)
    assert submit("train", "recipes/digits.yaml", []) == 130
    shown = capsys.readouterr()
    (submission_id,) = re.findall(r"Job '(\S+)' submitted\. To stop it: rayloom stop \1", shown.out)
    assert f"job {submission_id} keeps running: 'rayloom follow {submission_id}'" in shown.err
    assert f"'rayloom stop {submission_id}'" in shown.err


def test_a_job_is_stopped_and_followed_by_the_beginning_of_its_id(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [job("train-11aa", "RUNNING"), job("train-22bb", "RUNNING"), job("tune-33cc", "SUCCEEDED")]
    stopped: list[str] = []
    monkeypatch.setattr(JobsApi, "jobs", lambda self: known)
    monkeypatch.setattr(JobsApi, "stop", lambda self, submission_id: stopped.append(submission_id))
    assert (stop_job("train-2"), stopped) == ("train-22bb", ["train-22bb"])
    assert stop_job("deploy") is None
    with refused("job.ambiguous"):
        stop_job("train")
    known.pop(0)
    with refused("job.unknown"):
        stop_job("")  # as 'rayloom stop $JOB' without such a variable
    with refused("job.finished"):
        stop_job("tune")
    assert follow_job("tune") == 0
    assert "the log of tune" in capsys.readouterr().out
    with refused("job.unknown"):
        follow_job("deploy-1")


def test_a_cluster_s_token_file_without_a_token_is_told_by_its_name(tmp_path: Path) -> None:
    address = {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9"}
    with refused("token.missing"):
        JobsApi.of({**address, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")})
    with refused("cluster.no_answer"):
        JobsApi("http://127.0.0.1:9", "", "~/.ray/auth_token").require_access()


@pytest.mark.parametrize("job", ["train", "compile", "deploy"])
def test_storage_that_only_the_nodes_can_open_is_left_to_the_job(job: str, sent: Sent) -> None:
    assert submit(job, "recipes/digits.yaml", ["storage=nodes://bucket/x"]) == 0
    assert sent()[-1] == "storage=nodes://bucket/x"


def test_a_version_that_is_not_there_is_told_before_the_job_is_sent(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with refused("production.none"):
        require_stored("deploy", load_recipe("recipes/digits.yaml"), str(tmp_path), is_local=False)
    with refused("run.none_finished"):
        require_stored("compile", load_recipe("recipes/digits.yaml"), str(tmp_path), is_local=False)
