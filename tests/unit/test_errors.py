"""Errors say what was broken to programs and tests, also behind a process of Ray."""

import pickle

import pytest
from ray.exceptions import RayTaskError

from app.errors import NotServedError, OverloadError, RayloomError
from tests.wording import stale_entries


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
