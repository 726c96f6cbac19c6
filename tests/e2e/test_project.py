"""A project that ``rayloom init`` wrote, taken to an endpoint from its own folder.

``RAYLOOM_SCREENSHOTS=docs/images`` writes the picture of the README anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.browser import picture, seen, started_browser
from tests.helpers import result_of, run
from tests.jobs import serve_nothing

pytestmark = pytest.mark.slow
SENT = "py_modules_files"
"""In the path of a package that came with a job."""
ASKED = "where is my parcel"


@dataclass
class Project:
    folder: Path
    log: str
    """Of the job that deployed it."""

    @property
    def result(self) -> dict[str, Any]:
        return result_of(self.log)


@pytest.fixture(scope="module")
def deployed(cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The clients' environment names the cluster's address, so it is treated as a remote one."""
    folder = tmp_path_factory.mktemp("new")
    assert run("rayloom", "init", "tickets", folder=folder).returncode == 0
    project = folder / "tickets"
    with (project / "tickets/models.py").open("a", encoding="utf-8") as models:
        models.write('\nimport app\nimport tune_spaces\n\nprint("imported", app.__file__, tune_spaces.__file__)\n')
    short = ["tune.trials=2", "tune.epochs=1", "train.epochs=4", "compile.engines=[onnxruntime]"]
    command = ["rayloom", "submit", "lifecycle", "recipes/tickets.yaml", *short]
    done = run(*command, environment=cluster, folder=project)
    assert done.returncode == 0, done.stdout + done.stderr
    yield Project(project, done.stdout)
    serve_nothing(cluster)


def test_a_project_goes_to_an_endpoint_with_rayloom_s_packages_sent_along(
    cluster: dict[str, str], deployed: Project
) -> None:
    assert deployed.result["metrics"]["train"]["val_accuracy"] > 0.9
    imported = [line.split()[-2:] for line in deployed.log.splitlines() if "imported " in line]
    assert imported
    assert all(SENT in path for paths in imported for path in paths), imported
    asked = run("rayloom", "predict", "tickets", ASKED, environment=cluster, folder=deployed.folder)
    assert asked.stdout.startswith("delivery ")


@pytest.mark.debian("chromium", "chromium-driver")
@pytest.mark.usefixtures("deployed")
def test_a_person_asks_it_in_a_browser(cluster: dict[str, str]) -> None:
    status = run("rayloom", "status", environment=cluster).stdout
    (endpoint,) = {line.split()[1] for line in status.splitlines() if line.startswith("endpoint ")}
    with started_browser() as page:
        page.get(endpoint)
        seen(page, "#text").send_keys(ASKED)
        seen(page, "#ask").click()
        seen(page, "#answer", "delivery")
        seen(page, "#models", "Requests")
        picture(page, "endpoint", 900)
