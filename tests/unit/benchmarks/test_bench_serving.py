"""The benchmark of serving: requests and responses, the output of wrk, and the measured servers."""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.tensors import Tensors
from benchmarks.serving import h2load, wrk
from benchmarks.serving.__main__ import main
from benchmarks.serving.load import CpuTimes, Load, least_disturbed
from benchmarks.serving.processes import ServerError, running
from benchmarks.serving.race import race
from benchmarks.serving.steady import ask_steadily
from benchmarks.serving.wire import BinaryTensors, GrpcTensors, JsonTensors, NamedLists, Request, StackedList, Wire
from benchmarks.serving.workloads import EXACT, NARROWED, Tolerance, Workload
from benchmarks.spread import Spread

WRK_SAID = """Running 1s test @ http://127.0.0.1:8000
  1 threads and 16 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.23ms  456.00us  20.00ms   90.00%
REPORT {"requests": 4010, "duration_us": 2000000, "p50_us": 1234, "p99_us": 5678, \
"refused": 10, "connect": 0, "read": 2, "write": 0, "timeout": 1}
"""
H2LOAD_SAID = """finished in 2.00s, 2000.00 req/s, 247.07KB/s
requests: 4010 total, 4010 started, 4009 done, 4008 succeeded, 1 failed, 1 errored, 0 timeout
status codes: 4008 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 489.26KB (501000) total, 11.75KB (12030) headers (space savings 96.27%), 300.59KB (308000) data
"""
ANSWER_BYTES = 77
LOAD = Load(rate=2000.0, p50_ms=1.234, p99_ms=5.678, errors=13, generator_busy=0.25, stolen=0.05, cpu_us=100.0)
ROW: Tensors = {"ids": np.array([[1, 2]]), "mask": np.array([[1, 0]])}


def test_only_good_answers_count_and_every_error_does() -> None:
    assert wrk.parse(WRK_SAID, CpuTimes(machine_s=0.401, children_s=0.5, stolen_s=0.1)) == LOAD


@pytest.mark.parametrize("output", ["", WRK_SAID.replace("REPORT", ""), WRK_SAID.replace("4010", "0")])
def test_a_run_that_says_nothing_is_an_error(output: str) -> None:
    with pytest.raises(RuntimeError, match=r"printed no report|nothing was answered"):
        wrk.parse(output, CpuTimes(0.0, 0.0, 0.0))


def test_calls_without_a_message_and_calls_that_failed_are_errors() -> None:
    answers = [(1_000_000, 200, 1000), (1_001_000, 200, 2000), (1_002_000, 200, 9000), (2_990_000, 200, 10_000)]
    log = "".join(f"{start}\t{status}\t{taken}\n" for start, status, taken in [*answers, (1_500_000, -1, 9_000_000)])
    load = h2load.parse(H2LOAD_SAID, log, 4010, ANSWER_BYTES, CpuTimes(machine_s=0.0004, children_s=0.5, stolen_s=0.1))
    assert load == Load(2000.0, 5.5, pytest.approx(9.97), errors=10, generator_busy=0.25, stolen=0.05, cpu_us=100.0)


@pytest.mark.parametrize(("output", "log"), [("", "1\t200\t1\n"), (H2LOAD_SAID, ""), (H2LOAD_SAID, "1\t-1\t1\n")])
def test_a_load_of_calls_that_says_nothing_is_an_error(output: str, log: str) -> None:
    with pytest.raises(RuntimeError, match=r"printed no report|nothing was answered"):
        h2load.parse(output, log, 4010, ANSWER_BYTES, CpuTimes(0.0, 0.0, 0.0))


@pytest.mark.parametrize(("case", "package"), [("grpc", "nghttp2-client"), ("cnn", "wrk")])
def test_a_load_generator_that_is_missing_is_named(case: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=f"apt-get install {package}"):
        main(["--cases", case])


@pytest.mark.parametrize(
    ("stolen", "loads", "least"), [([0.05, 0.0], 1, 0.05), ([0.2, 0.04], 2, 0.04), ([0.3, 0.2, 0.1, 0.4, 0.5], 5, 0.1)]
)
def test_the_least_disturbed_load_counts_with_the_errors_of_all(stolen: list[float], loads: int, least: float) -> None:
    seen = (dataclasses.replace(LOAD, stolen=item) for item in stolen)
    assert least_disturbed(lambda: next(seen)) == dataclasses.replace(LOAD, stolen=least, errors=13 * loads)


@pytest.mark.parametrize(
    ("wire", "content", "headers"),
    [
        (NamedLists("/"), b'{"output": [0.5, -2]}', {}),
        (StackedList("/"), b"[[0.5, -2]]", {}),
        (JsonTensors("m"), b'{"outputs": [{"name": "logits", "shape": [1, 2], "data": [0.5, -2]}]}', {}),
        (
            BinaryTensors("m"),
            (header := b'{"outputs": [{"name": "logits"}]}') + np.array([0.5, -2], np.float32).tobytes(),
            {"Inference-Header-Content-Length": str(len(header))},
        ),
        (
            GrpcTensors("m"),
            pb.ModelInferResponse(
                outputs=[pb.ModelInferResponse.InferOutputTensor(name="logits", datatype="FP32", shape=[1, 2])],
                raw_output_contents=[np.array([0.5, -2], np.float32).tobytes()],
            ).SerializeToString(),
            {},
        ),
    ],
    ids=str,
)
def test_every_answer_is_read(wire: Wire, content: bytes, headers: dict[str, str]) -> None:
    answer = wire.answer(httpx.Response(200, content=content, headers=headers))
    assert answer.dtype == np.float32
    assert answer.tolist() == [0.5, -2.0]


def test_what_is_sent_holds_the_row() -> None:
    assert json.loads(NamedLists("/").request(ROW).body) == {"ids": [1, 2], "mask": [1, 0]}
    assert json.loads(StackedList("/").request(ROW).body) == {"inputs": [[[1, 2], [1, 0]]]}
    (ids, _) = json.loads(JsonTensors("m").request(ROW).body)["inputs"]
    assert ids == {"name": "ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}
    binary = BinaryTensors("m").request(ROW)
    length = int(binary.headers["Inference-Header-Content-Length"])
    assert [load["parameters"] for load in json.loads(binary.body[:length])["inputs"]] == [{"binary_data_size": 16}] * 2
    assert np.frombuffer(binary.body[length:], np.int64).tolist() == [1, 2, 1, 0]
    message = pb.ModelInferRequest.FromString(GrpcTensors("m").request(ROW).body)
    assert [(input_.name, input_.datatype, list(input_.shape)) for input_ in message.inputs] == [
        ("ids", "INT64", [1, 2]),
        ("mask", "INT64", [1, 2]),
    ]
    assert list(message.raw_input_contents) == [ROW["ids"].tobytes(), ROW["mask"].tobytes()]


def test_a_raw_request_is_one_that_http_knows() -> None:
    raw = Request("/p", b"\0\r\n\r\n", {"X": "y"}).raw("h:1")
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [b"POST /p HTTP/1.1", b"Host: h:1", b"Content-Length: 5", b"X: y"]
    assert body == b"\0\r\n\r\n"


@pytest.mark.parametrize(
    ("tolerance", "given", "wrong"),
    [
        (EXACT, [1.0, 2.0], None),
        (EXACT, [1.0, 2.1], "a number is 0.1 off"),
        (EXACT, [1.0], "1 numbers, expected 2"),
        (EXACT, [float("nan"), 2.0], "a number is nan off"),
        (NARROWED, [1.1, 2.1], None),
        (NARROWED, [2.0, 1.0], "a cosine of 0.8000"),
    ],
)
def test_an_answer_is_compared(tolerance: Tolerance, given: list[float], wrong: str | None) -> None:
    difference = tolerance.difference_of(np.array(given, np.float32), np.array([1.0, 2.0], np.float32))
    assert (difference is None) if wrong is None else str(difference).startswith(wrong)


class Doubling(BaseHTTPRequestHandler):
    """Doubles the numbers that it is given; 13 is too much for it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for the client's system to say that it has its head

    def do_POST(self) -> None:
        (values,) = json.loads(self.rfile.read(int(self.headers["Content-Length"]))).values()
        content = json.dumps({"output": [2 * value for value in values]}).encode()
        self.send_response(500 if 13 in values else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Not in the output of a test."""


@pytest.fixture
def doubling() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Doubling) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _asking(*values: float) -> Workload:
    rows = [{"x": np.array([[value, 1.0]])} for value in values]
    return Workload(rows, [(2 * row["x"][0]).astype(np.float32) for row in rows])


def test_a_server_is_checked_on_every_row(doubling: str) -> None:
    _asking(*range(12)).check(doubling, NamedLists("/"), EXACT)
    with pytest.raises(ServerError, match="answered 500"):
        _asking(*range(14)).check(doubling, NamedLists("/"), EXACT)
    with pytest.raises(ServerError, match="does not answer"):
        _asking(1).check("http://127.0.0.1:9", NamedLists("/"), EXACT)
    wrong = dataclasses.replace(_asking(1, 2), expected=_asking(1, 3).expected)
    with pytest.raises(ServerError, match="row 1 is answered wrong: a number is 2 off"):
        wrong.check(doubling, NamedLists("/"), EXACT)


@pytest.mark.debian("wrk")
def test_wrk_takes_turns_through_the_requests(doubling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(Doubling, "log_request", lambda _, code: statuses.append(code))
    asked = _asking(1, 13).requests(NamedLists("/"))
    load = wrk.drive(doubling, asked, connections=2, seconds=1)
    assert 0 < load.p50_ms <= load.p99_ms
    assert 0 < load.generator_busy < 1
    # Every other answer is an error. They are counted by the server: a busy machine makes the second longer.
    assert load.errors == pytest.approx(statuses.count(500), abs=4)
    assert statuses.count(200) == pytest.approx(statuses.count(500), abs=4)


class GrpcDoubling(grpc.GenericRpcHandler):
    """Doubles the numbers of a call; it refuses every other call that has the number 13."""

    def __init__(self) -> None:
        self.unlucky = count()

    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self.infer)

    def infer(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        values = np.frombuffer(pb.ModelInferRequest.FromString(message).raw_input_contents[0])
        if 13 in values and next(self.unlucky) % 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "bad luck")
        response = pb.ModelInferResponse(raw_output_contents=[(2 * values).astype(np.float32).tobytes()])
        response.outputs.add(name="logits", datatype="FP32", shape=[1, 2])
        return bytes(response.SerializeToString())


@contextlib.contextmanager
def _serving_grpc(handler: GrpcDoubling) -> Iterator[str]:
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool, [handler])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"grpc://127.0.0.1:{port}"
        server.stop(None).wait()


def test_a_server_is_checked_over_grpc() -> None:
    wire = GrpcTensors("m")
    wrong = dataclasses.replace(_asking(1, 2), expected=_asking(1, 3).expected)
    with _serving_grpc(GrpcDoubling()) as url:
        _asking(*range(12)).check(url, wire, EXACT)
        with pytest.raises(ServerError, match="ModelInfer answered 500: UNAVAILABLE: bad luck"):
            _asking(13, 13).check(url, wire, EXACT)
        with pytest.raises(ServerError, match="row 1 is answered wrong: a number is 2 off"):
            wrong.check(url, wire, EXACT)


@pytest.mark.debian("nghttp2-client")
def test_h2load_counts_refused_calls_as_errors() -> None:
    handler, wire = GrpcDoubling(), GrpcTensors("m")
    with _serving_grpc(handler) as url:
        load = h2load.drive(url, _asking(13).requests(wire), connections=2, seconds=1)
    assert 0 < load.p50_ms <= load.p99_ms
    assert 0 < load.generator_busy < 1
    before_the_load = 1 + 2 * h2load.PILOT_CALLS
    assert load.errors == pytest.approx((next(handler.unlucky) - before_the_load) / 2, abs=1)


def test_a_steady_load_asks_at_its_rate_whatever_is_answered(doubling: str) -> None:
    began_s = time.monotonic()
    times = ask_steadily(doubling, _asking(1, 13).requests(NamedLists("/")), rate=100, seconds=1)
    assert time.monotonic() - began_s >= 0.9
    assert 35 <= times.errors <= 65, "every other"
    assert 0 < times.p50_ms <= times.p99_ms


def test_a_steady_load_connects_again_if_the_server_closes_a_connection() -> None:
    class Closing(Doubling):
        def end_headers(self) -> None:
            self.send_header("Connection", "close")
            super().end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Closing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        times = ask_steadily(url, _asking(1).requests(NamedLists("/")), rate=50, seconds=0.5)
        server.shutdown()
    assert times.errors == 0


def test_a_server_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(ServerError, match="ended with 1:\nno such model"),
        running(command, {}, tmp_path, lambda: False),
    ):
        pass


def test_nothing_of_a_server_is_left_not_even_what_it_sent_away(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "open('ready', 'w').close()\n"
        "import time; time.sleep(600)\n"
    )
    with running([sys.executable, "-c", script], {"BENCH_TEST": str(tmp_path)}, tmp_path, (tmp_path / "ready").exists):
        assert len(_processes_of(tmp_path)) == 2
    assert _processes_of(tmp_path) == []


def _processes_of(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("BENCH_TEST") == str(folder) and process.pid != os.getpid():
                found.append(process.pid)
    return found


class Broken:
    """A contender that does not start."""

    name, setting, wire, tolerance = "broken", "", NamedLists("/"), EXACT

    @contextlib.contextmanager
    def serve(self, folder: Path) -> Iterator[str]:
        raise ServerError("no such backend:\na log\nits | end")
        yield ""


def test_a_server_that_does_not_run_is_left_out_and_the_rest_goes_on() -> None:
    ran = race([Broken()], _asking(1), {"loop": lambda: 7.0}, num_rounds=2, seconds=1)
    assert ran.absent == {"broken": "no such backend: … its \\| end"}
    assert not ran.results
    assert ran.loops == {"loop": Spread((7.0, 7.0))}
