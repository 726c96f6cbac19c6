"""Measure the seconds of one call and the number of its requests to an object store."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

from s3fs import S3FileSystem
from upath import UPath

from app.cli.versions import table_of
from app.repository.repository import Repository
from app.runs import latest_result
from app.serving.config import AnyDeployed, EndpointConfig
from app.serving.deployment import deployed_model
from app.serving.endpoint import Endpoint
from app.storage import to_path
from app.training.resume import newest_unfinished
from benchmarks.many.population import a_model, card, name_of, recipe_in, write_runs, write_versions

_RECIPE = "digits"


@dataclass(frozen=True)
class Cost:
    """The cost of one call."""

    seconds: float
    requests: int
    """The number of requests to the object store; 0 on a disk."""

    def __str__(self) -> str:
        unit, scale, digits = ("s", 1, 2) if self.seconds >= 0.1 else ("ms", 1e3, 1)
        if self.seconds < 1e-3:
            unit, scale, digits = "µs", 1e6, 0
        seconds = f"{self.seconds * scale:.{digits}f} {unit}"
        return f"{seconds}, {self.requests:,}" if self.requests else seconds


def of_runs(storage: UPath, count: int) -> dict[str, Cost]:
    """Measure finding the run of a recipe, which is the oldest of all runs."""
    write_runs(storage, count, _RECIPE)
    return {
        "jobs.compile finds the newest training": _cost(lambda: latest_result(storage, "train", _RECIPE)),
        "train.resume=latest": _cost(lambda: newest_unfinished(storage, "train", _RECIPE)),
    }


def of_versions(storage: UPath, count: int, models: int = 1) -> dict[str, Cost]:
    """Measure listing, publishing, promoting and planning a deploy."""
    write_versions(storage, models, count // models)
    repository, recipe = Repository(storage), recipe_in(storage, name_of(0))
    with a_model() as files:
        return {
            "rayloom models list": _cost(lambda: list(table_of(repository.list_versions()))),
            "list the names of all models": _cost(repository.names),
            "find the newest version (none in production)": _cost(lambda: repository.current(name_of(0))),
            "publish (none in production)": _cost(lambda: repository.publish(name_of(0), to_path(files), card())),
            "promote": _cost(lambda: repository.promote(name_of(0), 1)),
            "publish": _cost(lambda: repository.publish(name_of(0), to_path(files), card())),
            "jobs.deploy reads the version to deploy": _cost(lambda: deployed_model(recipe, storage)),
        }


def of_endpoint(storage: UPath, count: int) -> dict[str, Cost]:
    """Measure a replica that serves ``count`` models."""
    write_versions(storage, count + 1, 1)
    models = [deployed_model(recipe_in(storage, name_of(number)), storage) for number in range(count + 1)]
    return asyncio.run(_of_endpoint(models))


async def _of_endpoint(models: list[AnyDeployed]) -> dict[str, Cost]:
    def config(served: list[AnyDeployed]) -> EndpointConfig:
        return reduce(lambda others, model: others.serving(model.production.name, model), served, EndpointConfig())

    endpoint, sent = Endpoint(), config(models).model_dump(mode="json")
    costs = {
        "a new replica loads all models": await _async_cost(lambda: endpoint.update(config(models[:-1]))),
        "a replica loads one more model": await _async_cost(lambda: endpoint.update(config(models))),
        "parse the configuration": _cost(lambda: EndpointConfig.model_validate(sent)),
        "list the index for rayloom status": _cost(lambda: endpoint.index),
        "read the statistics of all models": _cost(endpoint.statistics),
        "check the health of all models": await _async_cost(endpoint.check),
        "route a request to its model": _cost(lambda: endpoint.route(name_of(0))),
    }
    await endpoint.update(EndpointConfig())
    return costs


def _cost(work: Callable[[], object]) -> Cost:
    with counted() as requests:
        began_s = time.perf_counter()
        work()
        return Cost(time.perf_counter() - began_s, len(requests))


async def _async_cost(work: Callable[[], Awaitable[object]]) -> Cost:
    with counted() as requests:
        began_s = time.perf_counter()
        await work()
        return Cost(time.perf_counter() - began_s, len(requests))


@contextmanager
def counted() -> Iterator[list[str]]:
    """Yield a list of the S3 methods that are called in the block."""
    called: list[str] = []
    original = S3FileSystem._call_s3

    async def call(self: Any, method: str, *arguments: Any, **fields: Any) -> Any:
        called.append(method)
        return await original(self, method, *arguments, **fields)

    S3FileSystem._call_s3 = call
    try:
        yield called
    finally:
        S3FileSystem._call_s3 = original
