"""Lookups in an object store need the same number of requests, however much it holds."""

import pytest
from upath import UPath

from app.storage import open_storage
from benchmarks.many.measures import of_runs, of_versions

FEW, MANY = 2, 10


@pytest.fixture
def bucket(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> UPath:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    UPath("s3://many").mkdir()
    return open_storage("s3://many")


def test_only_lists_cost_more_requests_the_more_is_listed(bucket: UPath) -> None:
    few, many = (of_versions(bucket / str(n), n) | of_runs(bucket / str(n), n) for n in (FEW, MANY))
    grown = {what: many[what].requests - few[what].requests for what in few}
    assert grown.pop("rayloom models list") == 2 * (MANY - FEW), "a manifest and its seal"
    assert not any(grown.values()), grown
    assert max(cost.requests for cost in few.values()) < 30
