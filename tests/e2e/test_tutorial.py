"""The tutorial's commands work, in their order, on a cluster of their own."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.helpers import BIN, ROOT, local_cluster
from tests.pages import blocks, mark_of

TUTORIAL = ROOT / "docs/tutorial/first_model.md"
DEFAULT_ENDPOINT = "http://127.0.0.1:8000"


def shown_by(script: str, environment: dict[str, str]) -> str:
    """Run a block of the page in a shell that stops at the first error, and return its standard output."""
    prelude = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f'{prelude}export PATH={BIN}:"$PATH"\n{script}'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_commands_of_the_tutorial_work_in_order(tmp_path: Path) -> None:
    scripts = [block for block in blocks(TUTORIAL, "bash") if not mark_of(block)]
    assert scripts[0].startswith("rayloom up\n")
    assert scripts[-1] == "rayloom down\n"
    with local_cluster(tmp_path) as environment:
        status = shown_by("rayloom status", environment)
        (endpoint,) = {line.split()[1] for line in status.splitlines() if line.startswith("endpoint ")}
        scripts[0] = scripts[0].removeprefix("rayloom up\n")  # it is up, on ports that no other cluster has
        shown = {script: shown_by(script.replace(DEFAULT_ENDPOINT, endpoint), environment) for script in scripts}
    asked = next(text for script, text in shown.items() if "rayloom predict" in script)
    assert asked.splitlines()[-1].split()[0] == "0"  # the digit in the picture
    versions = next(text for script, text in shown.items() if "rayloom models list" in script)
    assert [line.split()[1:3] for line in versions.splitlines()[-2:]] == [["1", "previous"], ["2", "production"]]
