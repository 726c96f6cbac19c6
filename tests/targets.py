"""Servers with one replica of an endpoint that serves the model 'toy'."""

import io
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from upath import UPath

from tests.engine_contract import exported
from tests.launch import Cluster
from tests.serving import serving
from tests.toy import config, deployed, publish


@dataclass(frozen=True)
class Target:
    """A server with one replica of the endpoint, which serves the model 'toy'."""

    http: str
    grpc: str
    """``host:port``, as for HTTP."""
    streams: str
    """``host:port`` for gRPC streams."""
    replicas: Callable[[], set[int]]
    """Their process ids."""
    log: Callable[[], str]


@contextmanager
def alone(folder: Path) -> Iterator[Target]:
    """Servers of our own, in this process."""
    publish(UPath(folder), exported())
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    with serving() as server:
        server.run(server.endpoint.update(config(UPath(folder))))
        yield Target(server.http, server.grpc, server.streams, lambda: {os.getpid()}, log.getvalue)
    logging.getLogger().removeHandler(handler)


@contextmanager
def in_serve(cluster: dict[str, str]) -> Iterator[Target]:
    """A replica in a cluster; a request of many rows keeps it busy, since each is a call of the engine."""
    (version,) = publish(UPath(cluster["RAYLOOM_STORAGE"]), exported())
    there = Cluster(cluster)
    logs = there.state.runtime / "ray/session_latest/logs"

    def replicas() -> set[int]:
        return {replica.pid for replica in there.replicas()}

    def log() -> str:
        files = {*logs.glob("serve/replica_rayloom_*")}.union(*(logs.glob(f"*{pid}.*") for pid in replicas()))
        return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)

    overrides = ("serve.replicas=1", "serve.batching.max_batch_size=1", "serve.threads=1")
    with deployed(cluster, version, *overrides) as artifacts:
        grpc = artifacts["grpc"]
        yield Target(artifacts["http"].removeprefix("http://"), grpc, grpc, replicas, log)


def calls(target: Target) -> int:
    """Of the engine, so far."""
    (stats,) = httpx.get(f"http://{target.http}/v2/models/toy/stats").json()["model_stats"]
    count: int = stats["execution_count"]
    return count
