"""An import that is told to stop cleans up and writes a result."""

import os
import subprocess
import sys
from pathlib import Path

from upath import UPath

from app.reports.catalog import list_runs
from tests.importing import EXACT, dense


def test_an_import_that_is_stopped_leaves_a_result_and_no_copy(tmp_path: Path) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    command = [sys.executable, "-c", "from app.cli.main import main; main()", "models", "import", "dense"]
    command += [str(dense(tmp_path / "dense.onnx")), f"--storage={tmp_path}", *EXACT]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as job:
        assert job.stdout is not None
        # The copy is in the temporary folder while variants are measured.
        assert "random rows" in job.stdout.readline()
        assert list(temporary.glob("rayloom-import-*"))
        job.terminate()
        assert job.wait(60) == 143
    (run,) = list_runs(UPath(tmp_path))
    assert run.status == "stopped"
    assert not list(temporary.glob("rayloom-import-*"))
    assert not (tmp_path / "models").exists()
