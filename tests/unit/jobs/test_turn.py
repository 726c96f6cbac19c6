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
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(Store, "texts", {})
    monkeypatch.setattr(_turn, "Store", Store)
    monkeypatch.setattr(_turn, "may_grow", lambda: False)
    monkeypatch.setattr(_turn, "driver_id", cluster.driver_id)
    monkeypatch.setattr(_turn, "living_drivers", cluster.living_drivers)
    monkeypatch.setattr(time, "monotonic", lambda: cluster.now)
    monkeypatch.setattr(time, "sleep", cluster.sleep)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": sum(cluster.nodes)})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": sum(cluster.nodes)})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": cpus}} for cpus in cluster.nodes])
    monkeypatch.setenv(_metadata_internals._VARIABLE, '{"metadata": {"job_submission_id": "train-1"}}')
    return cluster


def test_a_job_that_is_alone_starts_without_a_question(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with cluster.job():
        pass
    with cluster.job():  # a second process of the same job
        pass
    assert (cluster.sleeps, cluster.num_questions, capsys.readouterr().out) == ([], 0, "")


def test_a_second_process_of_a_job_waits_for_the_first(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    first = cluster.job()
    first.__enter__()
    cluster.during_sleep = lambda: len(cluster.sleeps) == 2 and first.__exit__(None, None, None)
    with cluster.job():
        lines = capsys.readouterr().out.splitlines()
        place = Place.of_line(lines[0])
        assert place is not None
        assert (place.place, place.behind, lines[1:]) == (1, ["train-1"], [STARTED])
    assert cluster.sleeps == [1.0, 1.0]


def test_a_job_that_no_node_is_large_enough_for_holds_nothing(cluster: Cluster) -> None:
    cluster.nodes = [2.0, 2.0]
    waits_in_ray = cluster.job(3.0, each=3.0)
    waits_in_ray.__enter__()
    with cluster.job(4.0, each=2.0):
        assert cluster.sleeps == []
    waits_in_ray.__exit__(None, None, None)


def test_a_killed_process_is_not_waited_for_although_another_of_its_job_lives(cluster: Cluster) -> None:
    killed = cluster.job()
    driver = killed.__enter__()
    cluster.living = {cluster.driver_id()} - {driver}
    with cluster.job():
        assert cluster.sleeps == []
        assert len([key for key in Store.texts if key.startswith("jobs/")]) == 1


def test_a_job_starts_with_a_warning_if_nobody_says_who_lives(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    first = cluster.job()
    first.__enter__()
    cluster.living = None
    with cluster.job():
        assert sum(cluster.sleeps) == 60.0
    assert "Ray does not say which other jobs still run: this job starts" in "".join(capsys.readouterr())
    first.__exit__(None, None, None)


def test_while_nobody_says_who_lives_a_job_sees_that_another_has_left(cluster: Cluster) -> None:
    first = cluster.job()
    first.__enter__()
    cluster.living = None
    cluster.during_sleep = lambda: len(cluster.sleeps) == 3 and first.__exit__(None, None, None)
    with cluster.job():
        assert len(cluster.sleeps) == 3


def test_jobs_far_behind_look_and_ask_less_often(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster.job():
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
    assert cluster.living is not None
    cluster.living.add("living")

    def leave() -> None:
        if cluster.now > 1100.0:
            cluster.living = {cluster.driver_id()}

    cluster.during_sleep = leave
    with cluster.job():
        assert set(cluster.sleeps) == {10.0}
        assert cluster.now <= 1130.0, "the last job finds out, too, that all before it were killed"
        assert cluster.num_questions <= 5


def test_what_another_release_or_program_has_left_in_the_store_holds_up_nobody(cluster: Cluster) -> None:
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
    with cluster.job():
        assert cluster.sleeps == []
        assert "starts/8" in Store.texts


def test_ray_names_the_variable_of_the_metadata_so() -> None:
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    assert _metadata_internals._VARIABLE == RAY_JOB_CONFIG_JSON_ENV_VAR
    assert _metadata_internals.job_metadata() == {}
