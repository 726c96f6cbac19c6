"""What tests of whole jobs share."""

from collections.abc import Iterator

import pytest

from tests.jobs import serve_nothing


@pytest.fixture
def emptied(cluster: dict[str, str]) -> Iterator[None]:
    """After the test the endpoint serves nothing, as others expect it."""
    yield
    serve_nothing(cluster)
