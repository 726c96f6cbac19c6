"""What a person sees of a job: bars on a terminal, plain lines elsewhere."""

import os
import pty
import re
import subprocess
import sys

import pytest

from app.cluster.job_view import JobView
from tests.helpers import ROOT

EPOCHS = 4_000
JOB = f"""
from app.cluster.job_view import JobView, spinner
with spinner("sending"):
    pass
with JobView() as view:
    view.show("reading [/tmp/a]: 3 of 4 parts, 5 of 8 MB, about 2 s left")
    view.show("── train ──")
    for epoch in range(1, {EPOCHS} + 1):
        view.show(f"epoch {{epoch}}/{EPOCHS}  loss 0.5  val_accuracy 0.9 [best]  3 samples/s  0:00 left")
    view.show('RESULT {{"status": "succeeded", "place": "host:100:"}}')
"""


def on_a_terminal(code: str, **environment: str) -> str:
    """Run code in a pseudo-terminal, and return all that it wrote there."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", **environment},
    ):
        os.close(theirs)
        written = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux says so at the end
                break
            if not piece:
                break
            written += piece
    os.close(ours)
    return written.decode()


def without_control(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_terminal_shows_progress_in_place_and_keeps_its_last_state() -> None:
    shown = on_a_terminal(JOB)
    lines = without_control(shown).replace("\r", "\n").splitlines()
    kept = [line.strip() for line in lines if line.startswith(("reading", "──", "epoch", "RESULT"))]
    assert kept == [
        "reading [/tmp/a]: 3 of 4 parts, 5 of 8 MB, about 2 s left",
        "── train ──",
        f"epoch {EPOCHS}/{EPOCHS}  loss 0.5  val_accuracy 0.9 [best]  3 samples/s  0:00 left",
        'RESULT {"status": "succeeded", "place": "host:100:"}',
    ]
    assert len(lines) < EPOCHS / 10
    assert "\x1b[?25h" in shown  # the cursor is back


STEPS = """
import time
from app.cluster.job_view import JobView
with JobView() as view:
    for line in (
        "    3  pruned", "trials 3/4  ended", "── compile ──", "variant 1/2  openvino fp32", "openvino fp32: fast"
    ):
        view.show(line)
        time.sleep(0.2)  # a bar is drawn ten times a second
"""


def test_a_terminal_shows_trials_and_variants_as_bars_between_lines_that_stay() -> None:
    shown = without_control(on_a_terminal(STEPS))
    assert re.search(r"trials .*━.* ended", shown)
    assert re.search(r"variant .*━.* openvino fp32", shown)
    kept = [line.strip() for line in shown.replace("\r", "\n").splitlines()]
    assert [line for line in kept if line.startswith(("3 ", "trials 3", "──", "variant 1", "openvino"))] == [
        "3  pruned",
        "── compile ──",
        "openvino fp32: fast",
    ]


def test_a_terminal_without_color_gets_none() -> None:
    assert re.search(r"\x1b\[[0-9;]*3\dm", on_a_terminal(JOB))
    assert not re.search(r"\x1b\[[0-9;]*3\dm", on_a_terminal(JOB, NO_COLOR="1"))


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines() -> None:
    assert on_a_terminal(JOB, TERM="dumb").count("epoch ") == EPOCHS


@pytest.mark.parametrize(
    ("detail", "kept"),
    [("normal", ["epoch 1/2  loss 1", "warning: w", "RESULT {}"]), ("quiet", ["warning: w", "RESULT {}"])],
)
def test_elsewhere_lines_are_plain(capsys: pytest.CaptureFixture[str], detail: str, kept: list[str]) -> None:
    with JobView(detail) as view:  # type: ignore[arg-type]
        for line in ("epoch 1/2  loss 1", "warning: w", "RESULT {}"):
            view.show(line)
    assert capsys.readouterr().out.splitlines() == kept
