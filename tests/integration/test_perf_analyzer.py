"""NVIDIA's load generator perf_analyzer runs unchanged against an endpoint."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from upath import UPath

from tests.engine_contract import exported, rows
from tests.perf_analyzer import PerfAnalyzer, PerfAnalyzerMissingError
from tests.serving import Server, serving
from tests.toy import config, publish

REQUESTS = 64
pytestmark = pytest.mark.debian("libb64-0d")


@pytest.fixture(scope="session")
def perf_analyzer() -> PerfAnalyzer:
    try:
        return PerfAnalyzer()
    except PerfAnalyzerMissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    storage = UPath(tmp_path_factory.mktemp("serving"))
    publish(storage, exported())
    with serving() as started:
        started.run(started.endpoint.update(config(storage)))
        yield started


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid row in the tool's input format. The endpoint would refuse the random tokens that the tool generates."""
    file = tmp_path_factory.mktemp("row") / "row.json"
    file.write_text(json.dumps({"data": [{name: tensor[0].tolist() for name, tensor in rows(1).items()}]}))
    return file


@pytest.mark.parametrize("connections", [1, 16])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer_works_unchanged(
    perf_analyzer: PerfAnalyzer, server: Server, row: Path, protocol: str, connections: int
) -> None:
    shapes = [f"--shape={name}:{tensor.shape[1]}" for name, tensor in rows(1).items()]
    load = [f"--concurrency-range={connections}", f"--request-count={REQUESTS}", f"--input-data={row}"]
    address = server.http if protocol == "http" else server.grpc
    ran = perf_analyzer.run("-m", "toy", "-i", protocol, "-u", address, *shapes, *load)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    seen = re.search(r"compute input \d+ usec \+ compute infer (\d+) usec \+ compute output \d+ usec", ran.stdout)
    assert seen is not None, ran.stdout
    assert int(seen[1]) > 0
    computed = server.endpoint.find("toy").statistics.inference_stats
    counts = {part.count for part in (computed.compute_input, computed.compute_infer, computed.compute_output)}
    assert counts == {computed.success.count}
