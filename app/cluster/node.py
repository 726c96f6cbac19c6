"""Settings for starting Ray on a node, of a local cluster or any other."""

import os
import sys
import tempfile
from pathlib import Path

from app.serving.ingress import haproxy


def node_folder() -> Path:
    """Return a new folder on this node's disk that only its owner can access.

    Its path is short, because Ray Serve and HAProxy make Unix sockets below it. It is new, so that a node never starts
    with the files of an earlier cluster.
    """
    return Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp"))


def node_settings(folder: Path) -> dict[str, str]:
    """Prepare a node for Rayloom's endpoint and jobs. Return the environment variables for ``ray start``.

    ``folder`` holds HAProxy's files. It must exist as long as Ray runs.
    """
    return {
        **haproxy.prepare(folder),
        # Jobs run 'python' by its name, which must be the one of this environment.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        # Ray would give training and serving a lower priority than all other processes.
        "RAY_worker_niceness": "0",
        # A stopped training job writes a checkpoint first, and Ray would wait for 3 s.
        "RAY_JOB_STOP_WAIT_TIME_S": "120",
    }
