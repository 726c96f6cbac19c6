"""Who is next when a cluster is full."""

import time
from typing import Any

import pytest

from app.cli.tables import aligned
from app.cluster.job_view import JobView
from app.cluster.queue import STARTED, Place, Queued, in_line, may_start, person, priority_of
from tests.wording import refused

TOTAL = {"CPU": 8.0, "GPU": 2.0}


def job(name: str, user: str, since: float, priority: Any = "normal", **demand: float) -> Queued:
    return Queued(
        ticket=name, job=name, driver=name, user=user, priority=priority, demand=demand or {"CPU": 1.0}, since=since
    )


@pytest.mark.parametrize(
    ("waiting", "started", "expected"),
    [
        ([job("b", "anna", 2), job("a", "anna", 1)], [], "a b"),
        ([job("a", "anna", 1, "low"), job("b", "anna", 2), job("c", "anna", 3, "high")], [], "c b a"),
        # Two of one person and one of another take turns.
        ([job("a", "anna", 1), job("b", "anna", 2), job("c", "bob", 3)], [], "a c b"),
        ([job("a", "anna", 1), job("b", "bob", 2)], [job("r", "anna", 0)], "b a"),
        # Half of the GPUs are more than a quarter of the CPUs.
        ([job("a", "anna", 1), job("b", "bob", 2)], [job("r", "anna", 0, GPU=1), job("s", "bob", 0, CPU=2)], "b a"),
        # What is larger than the cluster holds nothing of it.
        ([job("a", "anna", 1), job("b", "bob", 2)], [job("r", "anna", 0, CPU=16), job("s", "bob", 0)], "a b"),
        # A small share does not outrank a higher priority.
        ([job("a", "anna", 1, "high"), job("b", "bob", 2)], [job("r", "anna", 0)], "a b"),
    ],
)
def test_the_line_is_by_priority_then_fair_then_by_time(
    waiting: list[Queued], started: list[Queued], expected: str
) -> None:
    assert " ".join(each.job for each in in_line(waiting, started, TOTAL, {})) == expected


def test_people_alternate_where_one_job_fills_the_cluster() -> None:
    waiting = [job(f"a{number}", "anna", number) for number in range(3)] + [job("b", "bob", 3), job("c", "carl", 4)]
    turns = {"anna": 7, "bob": 6}
    expected = ["c", "b", "a0", "a1", "a2"]
    assert [each.job for each in in_line(waiting, [], {"CPU": 1.0}, turns)] == expected
    # The same order as one by one.
    begun = list[str]()
    while waiting:
        first = in_line(waiting, [], {"CPU": 1.0}, turns)[0]
        waiting.remove(first)
        turns[first.user] = 8 + len(begun)
        begun.append(first.job)
    assert begun == expected


def test_a_thousand_jobs_are_ordered_in_a_moment() -> None:
    waiting = [job(f"a{number}", f"user{number % 9}", number) for number in range(1000)]
    began_s = time.process_time()
    assert len(in_line(waiting, waiting[:100], TOTAL, {})) == 1000
    assert time.process_time() - began_s < 2, "each of the thousand does it every ten seconds"


@pytest.mark.parametrize(
    ("needed", "started", "free", "may_grow", "expected"),
    [
        (8, [], 0, False, True),  # no other job could make room
        (4, [4], 4, False, True),
        (4, [4], 8, False, True),  # the other has not taken its CPUs yet
        (5, [4], 8, False, False),
        (4, [4], 3, False, False),  # a deployed model has one
        (5, [4], 4, True, True),  # it asks for a node
        (1, [4, 5], 0, True, False),  # until the node has come
        (4, [16], 8, True, True),  # the other can never be placed
        (4, [16, 4], 4, True, True),
        (16, [16], 8, True, True),  # neither blocks those behind it
    ],
)
def test_the_first_starts_if_there_is_room_beside_what_the_others_need(
    needed: float, started: list[float], free: float, may_grow: bool, expected: bool
) -> None:
    running = [job(f"r{number}", "anna", 0, CPU=cpus) for number, cpus in enumerate(started)]
    assert may_start({"CPU": needed}, running, TOTAL, {"CPU": free}, may_grow) is expected


def test_a_person_reads_what_a_job_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(
        user="anna", priority="low", place=2, waiting=3, needs={"CPU": 2.0, "GPU": 1.0}, behind=["t-1", "t-2", "t-3"]
    )
    assert Place.of_line(place.to_line()) == place
    with JobView() as view:
        view.show(place.to_line())
    shown = "waiting, place 2 of 3 (anna, low), for 2 CPU and 1 GPU, after t-1, t-2 and 1 more\n"
    assert capsys.readouterr().out == shown
    assert Place.of_line('QUEUE {"length": 3}') is None, "the line of another program"
    later = place.model_copy(update={"place": 1})
    log = ["started", place.to_line(), later.to_line(), "(autoscaler) adds a node", ""]
    assert Place.of_log(log) == later
    assert Place.of_log([*log, STARTED, "data digits"]) is None


def test_an_unknown_priority_is_refused() -> None:
    with refused("priority.unknown", "rayloom_priority"):
        priority_of("urgent")


@pytest.mark.parametrize(
    "name",
    ["\x1b[31manna", "anna\nbob", "a\u2028b", "\udcff", " anna", "a" * 129],
    ids=["color", "line", "separator", "bytes", "space", "long"],
)
def test_a_name_that_others_cannot_read_in_the_list_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"RAYLOOM_USER": name})
    with refused("user.unreadable"):
        person()


def test_what_others_have_named_does_not_control_the_terminal() -> None:
    rows = [("job", "user"), ("train-1", "安娜"), ("a\x1b[2J\nb", r"CORP\bob")]
    assert list(aligned(rows)) == ["job          user", "train-1      安娜", r"a\x1b[2J\nb  CORP\bob"]
