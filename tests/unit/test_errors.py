"""Errors say what was broken to programs and tests, also behind a process of Ray."""

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from app import errors
from app.errors import NotServedError, OverloadError, RayloomError
from tests.helpers import ROOT
from tests.wording import stale_entries

_SINGLE_RULE = {
    "ActorBusyError", "BrokerUnreachableError", "DeadlineError", "DisconnectedError", "NonFiniteLossError",
    "NotServedError", "OverloadError", "RequestTooLargeError", "TryLaterError", "UnauthorizedError",
}  # fmt: skip
"""Classes that stand for a single rule, so their errors need not name one."""


@pytest.mark.parametrize(
    ("error", "rule", "key"),
    [
        (NotServedError("no such model"), "not_served", None),
        (OverloadError("full", 2.5).of("queue.full", "serve.batching"), "queue.full", "serve.batching"),
    ],
)
def test_rule_and_key_survive_pickling(error: RayloomError, rule: str, key: str | None) -> None:
    sent = pickle.loads(pickle.dumps(error))
    raised = RayTaskError("task", "traceback", error).as_instanceof_cause()
    assert (type(sent), str(sent), vars(sent)) == (type(error), str(error), vars(error))
    assert (sent.rule, sent.key) == (raised.rule, raised.key) == (rule, key)


def test_each_entry_of_the_wording_has_its_test(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getoption("--update-wording") or not stale_entries(), "run pytest --update-wording on the files"


def test_each_error_of_a_broad_class_names_the_broken_rule() -> None:
    broad = {name for name in vars(errors) if name.endswith("Error")} - _SINGLE_RULE
    files = [file for folder in ("app", "jobs", "serve_deployments") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 500
    assert not [site for file in files for site in _without_a_rule(file, broad)]


def _without_a_rule(file: Path, broad: set[str]) -> Iterator[str]:
    calls = [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.Call)]
    named = {call.func.value for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "of"}
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id in broad and call not in named:
            yield f"{file.relative_to(ROOT)}:{call.lineno} {call.func.id}"
