"""A search on a cluster that starts without workers and gets its nodes from an autoscaler."""

import contextlib
import json
import secrets
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.ports import unused
from tests.helpers import ROOT, run
from tests.launch import MARK, Launch, processes_where
from tests.node_provider import HEAD, LoopbackNodeProvider, autoscaling, node_environment
from tests.search import DIGITS, trials_of
from tests.tables import Faults

MAX_NODES = 2
ANY_PORTS = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]


def end_processes(mark: str) -> None:
    """Kill all processes with this mark and their children, until none is left."""
    while marked := processes_where(lambda process: process.environ().get(MARK) == mark):
        found = {*marked}
        for process in marked:
            with contextlib.suppress(psutil.Error):
                found.update(process.children(recursive=True))
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=5)


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start an autoscaling cluster, as ``ray up`` does, and yield the environment of its clients."""
    mark, (gcs, dashboard, client) = uuid.uuid4().hex, unused(3)
    config, token = tmp_path / "autoscaling.yaml", tmp_path / "token"
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    authentication = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    autoscaler = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": "1"}
    options = ["--num-cpus=1", "--object-store-memory=100000000", *ANY_PORTS]
    node = {"resources": {"CPU": 1}, "node_config": {"options": options}, "min_workers": 0, "max_workers": MAX_NODES}
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        scaling = autoscaling(LoopbackNodeProvider, {"cpu": node}, head=HEAD, gcs=f"{HEAD}:{gcs}", folder=folder)
        config.write_text(json.dumps(scaling), encoding="utf-8")
        try:
            started = run(
                *("ray", "start", "--head", "--num-cpus=0", f"--port={gcs}", f"--autoscaling-config={config}"),
                *(f"--node-ip-address={HEAD}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"),
                *(f"--temp-dir={folder}/head", "--disable-usage-stats", *ANY_PORTS),
                environment={
                    MARK: mark,
                    "PYTHONPATH": str(ROOT),
                    **authentication,
                    **autoscaler,
                    **node_environment(HEAD, "head"),
                },
            )
            assert started.returncode == 0, started.stdout + started.stderr
            yield {"RAY_ADDRESS": f"{HEAD}:{gcs}", "RAYLOOM_STORAGE": str(tmp_path / "storage"), **authentication}
        finally:
            end_processes(mark)


def test_a_search_uses_all_nodes_that_an_autoscaler_may_start(
    growing: dict[str, str], launch: Launch, tmp_path: Path, faults: Faults
) -> None:
    processes = tmp_path / "processes"
    processes.mkdir()
    with faults("U6", "a search on a cluster without CPUs that may start 2 nodes", "trains on both at once") as fault:
        client = launch(
            *("python", "-m", "jobs.tune", DIGITS, "train.epochs=1", "tune.trials=2", "tune.retries=0"),
            *("model.factory=tests.faults.troubled:MeetingCnn", f"model.args={{width: 8, folder: {processes}}}"),
            *("tune.scheduler=none", "tune.space=tests.faults.troubled:rates"),
            **growing,
        )
        result = client.result()
        assert "1 trials at once, up to 2 as the cluster grows" in client.output
        states = Counter(trial.state.name for trial in trials_of(growing, result["run_id"]))
        fault.saw(f"{dict(states)} in {len(list(processes.iterdir()))} processes")
        assert states == {"COMPLETE": 2}
