"""A project that ``rayloom init`` wrote, taken to an endpoint from its own folder."""

from pathlib import Path

import pytest

from tests.helpers import result_of, run

SENT = "py_modules_files"
"""In the path of a package that came with a job."""


@pytest.mark.slow
@pytest.mark.usefixtures("emptied")
def test_a_project_goes_to_an_endpoint_with_rayloom_s_packages_sent_along(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    """The clients' environment names the cluster's address, so it is treated as a remote one."""
    assert run("rayloom", "init", "tickets", folder=tmp_path).returncode == 0
    project = tmp_path / "tickets"
    with (project / "tickets/models.py").open("a", encoding="utf-8") as models:
        models.write('\nimport app\nimport tune_spaces\n\nprint("imported", app.__file__, tune_spaces.__file__)\n')
    short = ["tune.trials=2", "tune.epochs=1", "train.epochs=4", "compile.engines=[onnxruntime]"]
    command = ["rayloom", "submit", "lifecycle", "recipes/tickets.yaml", *short]
    done = run(*command, environment=cluster, folder=project)
    assert done.returncode == 0, done.stdout + done.stderr
    result = result_of(done.stdout)
    assert result["metrics"]["train"]["val_accuracy"] > 0.9
    imported = [line.split()[-2:] for line in done.stdout.splitlines() if "imported " in line]
    assert imported
    assert all(SENT in path for paths in imported for path in paths), imported
    asked = run("rayloom", "predict", "tickets", "where is my parcel", environment=cluster, folder=project)
    assert asked.stdout.startswith("delivery ")
