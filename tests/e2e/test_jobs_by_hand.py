"""A job that is started by hand, with no cluster around it."""

from pathlib import Path

from tests.helpers import run


def test_a_job_without_a_cluster_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {
        "RAYLOOM_STORAGE": str(tmp_path / "storage"),
        "RAYLOOM_HOME": str(tmp_path / "home"),
        "RAY_NUM_REDIS_GET_RETRIES": "1",  # by default, Ray asks each cluster on this machine 20 times
    }
    done = run("python", "-m", "jobs.train", "recipes/digits.yaml", environment=environment)
    assert done.returncode == 1
    assert "rayloom up" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "storage").exists()
