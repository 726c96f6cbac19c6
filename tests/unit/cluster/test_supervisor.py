"""What the supervisor decides without a cluster."""

from app.cluster.supervisor import RestartLimit
from tests.wording import refused


def test_what_keeps_dying_is_given_up_with_a_reason() -> None:
    limit = RestartLimit("the GCS", max_restarts=2, window_s=600)
    limit.count()
    limit.count()
    with refused("restarts.too_many"):
        limit.count()


def test_what_dies_now_and_then_is_started_again() -> None:
    limit = RestartLimit("the GCS", max_restarts=2, window_s=0)
    for _ in range(10):
        limit.count()
