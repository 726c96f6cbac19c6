"""What the supervisor decides without a cluster."""

import pytest

from app.cluster.supervisor import RestartLimit
from app.errors import ClusterError


def test_what_keeps_dying_is_given_up_with_a_reason() -> None:
    limit = RestartLimit("the GCS", max_restarts=2, window_s=600)
    limit.count()
    limit.count()
    with pytest.raises(ClusterError, match="the GCS died 3 times within 10 minutes"):
        limit.count()


def test_what_dies_now_and_then_is_started_again() -> None:
    limit = RestartLimit("the GCS", max_restarts=2, window_s=0)
    for _ in range(10):
        limit.count()
