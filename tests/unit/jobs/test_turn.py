"""Jobs of a full cluster wait for their turns. The store of the GCS is a dict here, and time stands still."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import ray

from app.cluster.queue import STARTED, Place, Queued
from jobs import _metadata_internals, _turn
from jobs._turn import _turn as turn


class Store:
    """Stands in for the store of Ray's GCS."""

    texts: ClassVar[dict[str, str]] = {}

    def put(self, key: str, text: str) -> None:
        self.texts[key] = text

    def put_new(self, key: str, text: str) -> bool:
        return self.texts.setdefault(key, text) is text

    def items(self, prefix: str) -> Iterator[tuple[str, str]]:
        yield from [(key, text) for key, text in self.texts.items() if key.startswith(prefix)]

    def remove(self, key: str) -> None:
        self.texts.pop(key, None)


class Cluster:
    """One with 2 CPUs, and a clock that only sleeping jobs move."""

    def __init__(self) -> None:
        self.now, self.sleeps = 1000.0, list[float]()
        self.living: set[str] | None = set()
        self.num_questions, self.driver = 0, 0
        self.nodes = [2.0]
        self.during_sleep: Callable[[], object] = lambda: None

    def living_drivers(self) -> set[str] | None:
        self.num_questions += 1
        return self.living

    def driver_id(self) -> str:
        return f"{self.driver:08}"

    def sleep(self, seconds: float) -> None:
        assert len(self.sleeps) < 100, "the job waits forever"
        self.sleeps.append(seconds)
        self.now += seconds
        self.during_sleep()

    @contextmanager
    def job(self, cpus: float = 2.0, each: float = 0.0) -> Iterator[str]:
        """The next process that takes its turn. The others live."""
        self.driver += 1
        driver = self.driver_id()
        if self.living is not None:
            self.living.add(driver)
        with turn({"CPU": cpus}, {"CPU": each}):
            yield driver


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    fake = Cluster()
    monkeypatch.setattr(Store, "texts", {})
    monkeypatch.setattr(_turn, "Store", Store)
    monkeypatch.setattr(_turn, "may_grow", lambda: False)
    monkeypatch.setattr(_turn, "driver_id", fake.driver_id)
    monkeypatch.setattr(_turn, "living_drivers", fake.living_drivers)
    monkeypatch.setattr(time, "monotonic", lambda: fake.now)
    monkeypatch.setattr(time, "sleep", fake.sleep)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": sum(fake.nodes)})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": sum(fake.nodes)})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": cpus}} for cpus in fake.nodes])
    monkeypatch.setenv(_metadata_internals._VARIABLE, '{"metadata": {"job_submission_id": "train-1"}}')
    return fake


def test_a_job_that_is_alone_starts_without_a_question(fake: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with fake.job():
        pass
    with fake.job():  # a second process of the same job
        pass
    assert (fake.sleeps, fake.num_questions, capsys.readouterr().out) == ([], 0, "")


def test_a_second_process_of_a_job_waits_for_the_first(fake: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    first = fake.job()
    first.__enter__()
    fake.during_sleep = lambda: len(fake.sleeps) == 2 and first.__exit__(None, None, None)
    with fake.job():
        lines = capsys.readouterr().out.splitlines()
        place = Place.of_line(lines[0])
        assert place is not None
        assert (place.place, place.behind, lines[1:]) == (1, ["train-1"], [STARTED])
    assert fake.sleeps == [1.0, 1.0]


def test_a_job_that_no_node_is_large_enough_for_holds_nothing(fake: Cluster) -> None:
    fake.nodes = [2.0, 2.0]
    waits_in_ray = fake.job(3.0, each=3.0)
    waits_in_ray.__enter__()
    with fake.job(4.0, each=2.0):
        assert fake.sleeps == []
    waits_in_ray.__exit__(None, None, None)


def test_a_killed_process_is_not_waited_for_although_another_of_its_job_lives(fake: Cluster) -> None:
    killed = fake.job()
    driver = killed.__enter__()
    fake.living = {fake.driver_id()} - {driver}
    with fake.job():
        assert fake.sleeps == []
        assert len([key for key in Store.texts if key.startswith("jobs/")]) == 1


def test_a_job_starts_with_a_warning_if_nobody_says_who_lives(
    fake: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    first = fake.job()
    first.__enter__()
    fake.living = None
    with fake.job():
        assert sum(fake.sleeps) == 60.0
    assert "Ray does not say which other jobs still run: this job starts" in "".join(capsys.readouterr())
    first.__exit__(None, None, None)


def test_while_nobody_says_who_lives_a_job_sees_that_another_has_left(fake: Cluster) -> None:
    first = fake.job()
    first.__enter__()
    fake.living = None
    fake.during_sleep = lambda: len(fake.sleeps) == 3 and first.__exit__(None, None, None)
    with fake.job():
        assert len(fake.sleeps) == 3


def test_jobs_far_behind_look_and_ask_less_often(fake: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake.job():
        pass
    before = [
        Queued(
            ticket=f"t{number}", job=f"j{number}", driver="living", user="anna", priority="high", demand={"CPU": 2.0},
            since=number,
        )
        for number in range(20)
    ]  # fmt: skip
    for job in before:
        Store().put(f"jobs/{job.ticket}", job.model_dump_json())
    assert fake.living is not None
    fake.living.add("living")

    def leave() -> None:
        if fake.now > 1100.0:
            fake.living = {fake.driver_id()}

    fake.during_sleep = leave
    with fake.job():
        assert set(fake.sleeps) == {10.0}
        assert fake.now <= 1130.0, "the last job finds out, too, that all before it were killed"
        assert fake.num_questions <= 5


def test_what_another_release_or_program_has_left_in_the_store_holds_up_nobody(fake: Cluster) -> None:
    left = Queued(
        ticket="t", job="j", driver="living", user="anna", priority="high", demand={"CPU": 2.0}, since=0.0
    ).model_dump_json()  # fmt: skip
    Store.texts.update(
        {
            "jobs/a": "garbage", "jobs/b": left.replace("2.0", "NaN"), "jobs/c": left.replace("2.0", "-2.0"),
            "jobs/d": left.replace("high", "urgent"), "starts/first": "t", "starts/-1": "t", "starts/7": "gone",
            "turns/anna": "never", "turns/bob": "",
        }
    )  # fmt: skip
    with fake.job():
        assert fake.sleeps == []
        assert "starts/8" in Store.texts


def test_ray_names_the_variable_of_the_metadata_so() -> None:
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    assert _metadata_internals._VARIABLE == RAY_JOB_CONFIG_JSON_ENV_VAR
    assert _metadata_internals.job_metadata() == {}
