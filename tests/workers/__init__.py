"""Ray workers as forks of a process that has already imported slow modules."""

import os
from pathlib import Path


def forked_workers(home: Path) -> dict[str, str]:
    """Return the environment of a cluster whose workers are forked. The path of ``home`` must be short."""
    before = os.environ.get("PYTHONPATH")
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2]), *([before] if before else [])]
    return {
        "PYTHONPATH": os.pathsep.join(folders),
        "RAYLOOM_TEST_WORKERS": str(home / "workers"),
        "RAY_worker_niceness": "0",  # tests wait for the workers, which must not yield to other tests
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # each change of the endpoint waits for it
    }
