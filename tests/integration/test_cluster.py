"""The local cluster: guarded, known, and gone without a trace."""

import contextlib
import json
import socket
import stat
import tempfile
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers import rayloom, run
from tests.proxies import listening


def belongs_to(process: psutil.Process, state: dict[str, str]) -> bool:
    with contextlib.suppress(psutil.Error):  # another user's, or ended while we looked
        return process.environ().get("RAYLOOM_CLUSTER") == state["id"] or state["runtime"] in " ".join(
            process.cmdline()
        )
    return False


SHELL_JOB = {"entrypoint": "touch /tmp/rayloom-was-here"}


def headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_the_token_is_private_and_guards_the_jobs_api(cluster: dict[str, str]) -> None:
    path = Path(cluster["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    jobs = f"{cluster['RAY_API_SERVER_ADDRESS']}/api/jobs/"
    assert httpx.post(jobs, json=SHELL_JOB).status_code == 401
    assert httpx.post(jobs, json=SHELL_JOB, headers=headers("0" * 64)).status_code == 403
    assert httpx.get(jobs, headers=headers(path.read_text(encoding="utf-8"))).status_code == 200


def test_a_wrong_token_is_told(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0" * 64, encoding="utf-8")
    environment = {**cluster, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    refused = rayloom("submit", "train", "recipes/digits.yaml", environment=environment)
    assert refused.returncode == 2
    assert f"refuses the token of {tmp_path / 'token'}" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_address_where_nothing_answers_is_told(cluster: dict[str, str]) -> None:
    environment = {**cluster, "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9"}
    refused = rayloom("submit", "train", "recipes/digits.yaml", environment=environment)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: no cluster answers at 'http://127.0.0.1:9'")


def test_a_second_cluster_in_the_same_home_is_refused(cluster: dict[str, str]) -> None:
    refused = rayloom("up", environment=cluster)
    assert refused.returncode == 2
    assert cluster["RAY_API_SERVER_ADDRESS"] in refused.stderr
    assert "rayloom down" in refused.stderr


def test_work_that_waits_for_a_node_says_so_leaves_no_process_and_a_search_wants_a_dashboard() -> None:
    script = """
import io, os, psutil, ray, sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from app.config import Placement
from jobs import _node
from jobs._cluster import require_dashboard
from tests.helpers import wait_until

_node._USUAL_START_S = 0.1
ray.init(num_cpus=1, include_dashboard=False)
holder = ray.remote(num_cpus=1)(type("Holder", (), {})).remote()
with redirect_stdout(io.StringIO()) as printed, ThreadPoolExecutor() as pool:
    pid = pool.submit(_node.run_on_node, "work", lambda log: log("begins") or os.getpid(), Placement({"CPU": 1}))
    wait_until(lambda: "work has not started yet: it is waiting for a node with 1 CPU free" in printed.getvalue())
    ray.kill(holder)
assert printed.getvalue().endswith("start its process\\nbegins\\n"), printed.getvalue()
wait_until(lambda: not psutil.pid_exists(pid.result()))
print("it is gone")
require_dashboard("a trial's workers")
"""
    done = run("python", "-c", script)
    assert "it is gone\n" in done.stdout, done.stderr
    assert done.returncode
    assert "ClusterError: the cluster's dashboard does not answer, and without it a trial's workers" in done.stderr


def test_code_stays_in_the_cluster_after_its_job_until_it_is_dropped(tmp_path: Path) -> None:
    job = """
import ray, sys
from jobs._code import keep_code
ray.init(sys.argv[1], runtime_env={"working_dir": sys.argv[2]})
if sys.argv[2].endswith("kept"):
    keep_code("revision", {})
"""
    script = """
import ray, subprocess, sys
from ray.experimental.internal_kv import _internal_kv_list
from jobs._code import drop_code
from tests.helpers import wait_until

context = ray.init(num_cpus=1, include_dashboard=False)
for folder in sys.argv[2:]:
    subprocess.run([sys.executable, "-c", sys.argv[1], context.address_info["gcs_address"], folder], check=True)
wait_until(lambda: len(_internal_kv_list("gcs://")) == 1)
drop_code({"revision"})
assert len(_internal_kv_list("gcs://")) == 1
drop_code({"another"})
wait_until(lambda: not _internal_kv_list("gcs://"))
"""
    folders = [tmp_path / "kept", tmp_path / "unused"]
    for folder in folders:
        folder.mkdir()
        (folder / folder.name).touch()
    # Ray keeps what was uploaded for ten minutes, by default.
    environment = {"RAY_RUNTIME_ENV_TEMPORARY_REFERENCE_EXPIRATION_S": "1"}
    done = run("python", "-c", script, job, *map(str, folders), environment=environment)
    assert done.returncode == 0, done.stderr


def test_status_lists_the_ports_that_others_could_reach(cluster: dict[str, str]) -> None:
    shown = rayloom("status", "--ports", environment=cluster).stdout
    state = json.loads((Path(cluster["RAYLOOM_HOME"]) / "cluster/cluster.json").read_text(encoding="utf-8"))
    listed = {int(line.split()[0]) for line in shown.splitlines() if line.startswith("  ")}
    opened = {
        connection.laddr.port
        for process in psutil.process_iter()
        if belongs_to(process, state)
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and not connection.laddr.ip.endswith("127.0.0.1")
    }
    assert state["gcs_port"] in listed
    assert opened <= listed
    assert state["dashboard_port"] not in listed
    assert "supervisor watches Ray's control processes" in shown
    assert "\n  " not in rayloom("status", environment=cluster).stdout


@pytest.mark.parametrize("option", ["--dashboard-port", "--serve-port"])
def test_a_port_in_use_is_refused_and_nothing_is_left(option: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused = run("rayloom", "up", option, port, environment={"RAYLOOM_HOME": str(tmp_path)})
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: port {port} is in use: give {option} another one")
    assert list(tmp_path.iterdir()) == []


def test_it_does_not_start_without_a_token(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be", encoding="utf-8")
    refused = run("rayloom", "up", environment={"RAYLOOM_HOME": str(tmp_path / "home")})
    assert refused.returncode == 2
    assert "the token" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_cluster_that_is_not_up_is_told(tmp_path: Path) -> None:
    for command in (["status"], ["env"], ["predict", "digits", "x"]):
        refused = rayloom(*command, environment={"RAYLOOM_HOME": str(tmp_path)})
        assert refused.returncode == 2, command
        assert refused.stderr == "error: no local cluster is up: start one with 'rayloom up'\n"


def test_down_ends_what_up_started_and_nothing_else(cluster: dict[str, str], tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rayloom-other-") as home:
        other = {"RAYLOOM_HOME": home}
        assert run("rayloom", "up", environment=other).returncode == 0
        state = json.loads((Path(home) / "cluster/cluster.json").read_text(encoding="utf-8"))
        stopped = run("rayloom", "down", environment=other)
        assert stopped.returncode == 0
        assert list(Path(home).iterdir()) == []
    assert not Path(state["runtime"]).exists()
    assert not [process for process in psutil.process_iter() if belongs_to(process, state)]
    assert rayloom("status", environment=cluster).returncode == 0


def test_no_command_asks_a_proxy_for_the_cluster(cluster: dict[str, str]) -> None:
    with listening(403) as proxy:
        given = {**cluster, "HTTP_PROXY": proxy.url, "http_proxy": proxy.url, "NO_PROXY": "", "no_proxy": ""}
        commands = (["status"], ["submit", "plan", "recipes/digits.yaml"], ["predict", "nothing", "a text"])
        done = {words[0]: rayloom(*words, environment=given) for words in commands}
        assert not proxy.lines
    assert done["status"].returncode == done["submit"].returncode == 0, done
    assert "not served" in done["predict"].stderr or "nothing" in done["predict"].stderr
