"""Traces of requests and jobs, as a collector gets them: OpenTelemetry's protocol over HTTP on loopback."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from upath import UPath

from app.config import load_recipe
from app.errors import DeadlineError, OverloadError, RecipeError
from app.ports import unused
from app.runs import Run, execute
from app.serving.batching.batcher import Batcher
from app.serving.batching.scheduler import BatchingPolicy
from app.serving.endpoint import Endpoint
from app.serving.generation.statistics import RequestTimer, StreamStatistics
from app.serving.rollout import Shadow
from app.telemetry import tracing
from app.telemetry.tracing import RequestTracer, current_request, find_tracer, within_request
from app.tensors import Tensors
from tests.calls import call, exchange
from tests.engine_contract import exported, rows
from tests.helpers import ROOT, run, wait_until
from tests.receiver import HttpReceiver
from tests.serving import Server, serving
from tests.toy import answering, asked, body, config, publish
from tests.unary import GOOD

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED, UNTRACED = f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00"


class Collector:
    """What a collector was sent."""

    def __init__(self, receiver: HttpReceiver) -> None:
        self.receiver = receiver

    def spans(self) -> list[Span]:
        """All spans, once those that have ended are sent."""
        tracing.flush()
        return self.received()

    def received(self) -> list[Span]:
        """The spans that came so far."""
        requests = [ExportTraceServiceRequest.FromString(content) for _, content in self.receiver.requests]
        scopes = [
            scope for request in requests for resource in request.resource_spans for scope in resource.scope_spans
        ]
        return [span for scope in scopes for span in scope.spans]

    def named(self, name: str) -> list[Span]:
        """Those of a name."""
        return [span for span in self.spans() if span.name == name]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    receiver = HttpReceiver(200)
    monkeypatch.setenv(tracing.ENDPOINTS[1], receiver.url.rpartition("/")[0])
    monkeypatch.setenv(tracing.RATIO, "0")
    _forget()
    yield Collector(receiver)
    _forget()
    receiver.server.shutdown()
    receiver.server.server_close()


def _forget() -> None:
    tracing.find_tracer.cache_clear()
    tracing._sender.cache_clear()


@pytest.fixture
def server(collector: Collector, tmp_path: Path) -> Iterator[Server]:
    publish(UPath(tmp_path), exported(), answering(1))
    with serving() as started:
        started.run(started.endpoint.update(config(UPath(tmp_path))))
        yield started


def attributes(span: Span) -> dict[str, Any]:
    return {pair.key: pair.value.string_value or pair.value.int_value for pair in span.attributes}


def post(server: Server, traceparent: str | None = None, path: str = "infer") -> httpx.Response:
    headers = {"traceparent": traceparent} if traceparent else {}
    return httpx.post(f"http://{server.http}/v2/models/toy/{path}", json=body(rows(1)), headers=headers)


def test_a_request_goes_on_with_the_trace_of_its_client(server: Server, collector: Collector) -> None:
    answered = post(server, TRACED)
    assert answered.status_code == 200
    assert post(server, UNTRACED).status_code == 200
    assert post(server).status_code == 200
    assert server.fast_path.answered == 3  # all took the short way
    spans = {span.name: span for span in collector.spans()}
    assert spans.keys() == {"request", "queue", "batch", "engine"}
    request, batch = spans["request"], spans["batch"]
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    assert request.parent_span_id.hex() == SPAN_ID
    assert answered.headers["traceparent"] == f"00-{TRACE_ID}-{request.span_id.hex()}-01"
    assert attributes(request) == {"rpc.system": "http", "model": "toy", "version": "1", "outcome": "ok"}
    assert attributes(batch) == {"model": "toy", "version": "1", "rows": 1, "reason": "idle"}
    assert {spans["queue"].parent_span_id, batch.parent_span_id} == {request.span_id}
    assert spans["engine"].parent_span_id == batch.span_id
    for outer, inner in ((request, spans["queue"]), (request, batch), (batch, spans["engine"])):
        assert outer.start_time_unix_nano - 1e6 <= inner.start_time_unix_nano
        assert inner.end_time_unix_nano <= outer.end_time_unix_nano + 1e6


def test_requests_of_one_batch_are_linked_to_it(server: Server, collector: Collector) -> None:
    blocked = server.endpoint.find("toy", None)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(post, server, TRACED) for _ in range(64)]
        assert all(answer.result().status_code == 200 for answer in answers)
    requests, batches = collector.named("request"), collector.named("batch")
    assert len(requests) == 64
    linked = [link.span_id for batch in batches for link in batch.links]
    assert sorted(linked) == sorted(span.span_id for span in requests)
    assert len(batches) <= blocked.batching.executions
    assert len(collector.named("queue")) == 64


def test_calls_and_natural_input_are_traced_too(server: Server, collector: Collector) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.infer("toy", asked(tritonclient.grpc, rows(1)), headers={"traceparent": TRACED})
        client.infer("toy", asked(tritonclient.grpc, rows(1)))
    predicted = httpx.post(
        f"http://{server.http}/v1/models/toy/predict", json={"inputs": "good"}, headers={"traceparent": TRACED}
    )
    assert predicted.status_code == 200
    assert predicted.headers["traceparent"].startswith(f"00-{TRACE_ID}-")
    answers: Queue[Any] = Queue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result), headers={"traceparent": TRACED})
        client.async_stream_infer("toy", asked(tritonclient.grpc, rows(1)))
        assert not isinstance(answers.get(timeout=30), Exception)
    requests = collector.named("request")
    assert [attributes(span)["rpc.system"] for span in requests] == ["grpc", "natural", "grpc"]
    assert {span.trace_id.hex() for span in requests} == {TRACE_ID}
    assert len(collector.named("engine")) == 3


def duration_s(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_a_request_waits_once_however_many_calls_it_takes(collector: Collector) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def infer(inputs: Tensors) -> Tensors:
        time.sleep(0.05)
        if inputs["x"].max() > 1:
            begun.set()
            assert may_end.wait(60)
        if inputs["x"].min() < 0:
            raise FloatingPointError("negative")
        return inputs

    async def scenario() -> None:
        tracer = find_tracer()
        assert tracer is not None
        batcher = Batcher(infer, BatchingPolicy(max_batch_size=2))
        with within_request(RequestTracer(tracer, 1.0).begin("http", None)):
            split = asyncio.create_task(batcher.infer({"x": np.ones((5, 1))}))
            await split  # three calls
            failing = [batcher.infer({"x": np.full((1, 1), value)}) for value in (1.0, -1.0)]
            await asyncio.gather(*failing, return_exceptions=True)  # one call, and one for each of them
            running = asyncio.create_task(batcher.infer({"x": np.full((2, 1), 2.0)}))
            assert await asyncio.to_thread(begun.wait, 60)
            with pytest.raises(DeadlineError):
                await batcher.infer({"x": np.ones((1, 1))}, timeout_s=0.01)
            may_end.set()
            await running
        await batcher.close()

    asyncio.run(scenario())
    assert len(collector.named("queue")) == 5, "one for each request, the late one among them"
    engines = collector.named("engine")
    assert [span.status.message for span in engines].count("negative") == 2
    assert all(duration_s(span) > 0.04 for span in engines)


def test_requests_are_answered_if_their_spans_cannot_be_made(
    server: Server, collector: Collector, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.serving.batching.batcher._moment_ns", Mock(side_effect=RuntimeError("no clock")))
    assert post(server, TRACED).status_code == 200
    assert "spans cannot be made (RuntimeError: no clock)" in capfd.readouterr().err


def test_copies_for_a_shadow_are_not_in_the_trace_of_the_client(collector: Collector) -> None:
    async def copy(seen: "asyncio.Future[Any]") -> Any:
        seen.set_result(current_request())

    async def scenario() -> None:
        tracer = find_tracer()
        assert tracer is not None
        seen: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with within_request(RequestTracer(tracer, 1.0).begin("http", None)):
            Shadow(Mock()).send(copy(seen), Mock(), Mock(), 0)
        assert await seen is None

    asyncio.run(scenario())


def test_a_generated_answer_has_spans_as_far_as_it_came(collector: Collector) -> None:
    tracer, statistics = find_tracer(), StreamStatistics()
    assert tracer is not None
    with within_request(RequestTracer(tracer, 1.0).begin("openai", None)):
        answered, late = RequestTimer(statistics), RequestTimer(statistics)
    time.sleep(0.02)
    answered.started(prompt_tokens=3)
    answered.received(0, 1)
    answered.answered()
    late.failed(DeadlineError("late"))
    spans = collector.spans()
    assert sorted(span.name for span in spans) == ["decode", "prefill", "queue", "queue"]
    assert all(duration_s(span) > 0.01 for span in spans if span.name == "queue")


def test_a_request_that_is_refused_has_its_outcome(
    server: Server, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OverloadError("full"))
    monkeypatch.setattr(server.endpoint.find("toy").batcher, "submit", full)
    refused = post(server, TRACED)
    (request,) = collector.named("request")
    assert refused.status_code == 503
    assert refused.headers["traceparent"] == f"00-{TRACE_ID}-{request.span_id.hex()}-01"
    assert attributes(request)["outcome"] == "overload"
    assert request.status.code == request.status.STATUS_CODE_ERROR
    assert [event.name for event in request.events] == ["exception"]


def test_a_refused_grpc_call_has_its_outcome_and_its_error(
    server: Server, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OverloadError("full"))
    monkeypatch.setattr(server.endpoint.find("toy").batcher, "submit", full)
    exchange(server.http, call(GOOD, f"traceparent: {TRACED}"))
    (request,) = collector.named("request")
    assert attributes(request)["outcome"] == "overload"
    assert [event.name for event in request.events] == ["exception"]


@pytest.mark.parametrize("path", ["v2/models/toy/infer", "v1/models/toy/predict"])
def test_a_request_that_fails_has_its_error(server: Server, collector: Collector, path: str) -> None:
    refused = httpx.post(f"http://{server.http}/{path}", json={"inputs": []}, headers={"traceparent": TRACED})
    (request,) = collector.named("request")
    assert request.status.code == request.status.STATUS_CODE_ERROR
    assert [event.name for event in request.events] == ["exception"]
    assert refused.headers["traceparent"] == f"00-{TRACE_ID}-{request.span_id.hex()}-01"


def test_a_share_of_the_requests_is_traced_once_each(collector: Collector) -> None:
    numbers = iter([0.5, 0.005, 0.2])
    tracer = find_tracer()
    assert tracer is not None
    chosen = RequestTracer(tracer, 0.01, lambda: next(numbers))
    assert [chosen.begin("http", traceparent) is not None for traceparent in (None, None, UNTRACED, TRACED)] == [
        False, True, False, True,
    ]  # fmt: skip
    assert chosen.begin("http", "nonsense") is None


def test_stages_of_a_job_are_spans_within_it(collector: Collector, tmp_path: Path) -> None:
    recipe = load_recipe(str(ROOT / "recipes/digits.yaml"), [f"storage={tmp_path}"])

    def work(run: Run) -> Any:
        with tracing.stage("prepare"):
            parent = tracing.current_traceparent()
        tracing.call_within(parent, "elsewhere", lambda _: None, None)
        raise RecipeError("a reason")

    assert execute(Run.start("train", recipe), work).error == "a reason"
    spans = {span.name: span for span in collector.spans()}
    assert spans["prepare"].parent_span_id == spans["train"].span_id
    assert attributes(spans["train"])["recipe"] == "digits"
    assert spans["train"].status.code == spans["train"].status.STATUS_CODE_ERROR


def test_a_collector_that_does_not_answer_holds_up_no_job(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_FLUSH_TIMEOUT_S", 0.5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")  # who waits for it waits far too long
    collector.receiver.open.clear()
    began_s = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        tracing.call_within(None, "elsewhere", lambda zero: 1 / zero, 0)
    assert time.monotonic() - began_s < 60.0
    wait_until(lambda: bool(collector.received()))
    (span,) = collector.received()
    assert span.status.code == span.status.STATUS_CODE_ERROR
    code = "from app.telemetry import tracing\nwith tracing.stage('last'): pass"
    assert run("python", "-c", code, timeout=60).returncode == 0
    assert [span.name for span in collector.received()] == ["elsewhere", "last"]
    collector.receiver.open.set()


@pytest.mark.parametrize(
    ("variable", "given", "warning"),
    [
        (tracing.RATIO, "", ""),
        (tracing.RATIO, "high", "is 'high', not a number"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "there are no traces (ValueError"),
    ],
)
def test_a_variable_that_cannot_be_read_stops_no_replica(
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    variable: str,
    given: str,
    warning: str,
) -> None:
    monkeypatch.setenv(variable, given)
    Endpoint()
    said = capfd.readouterr().err
    assert warning in said
    assert bool(said) == bool(warning)


def test_without_a_collector_nothing_is_imported() -> None:
    code = (
        "import sys, app.serving.endpoint as e; assert e.Endpoint().traffic.tracer is None; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    environment = dict.fromkeys(tracing.ENDPOINTS, "")
    assert run("python", "-c", code, environment=environment).returncode == 0


def test_requests_are_answered_while_the_collector_is_away(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, tmp_path: Path
) -> None:
    (port,) = unused(1)
    monkeypatch.setenv(tracing.ENDPOINTS[1], f"http://127.0.0.1:{port}")
    _forget()
    publish(UPath(tmp_path), exported())
    with serving() as started:
        started.run(started.endpoint.update(config(UPath(tmp_path))))
        with httpx.Client(base_url=f"http://{started.http}", headers={"traceparent": TRACED}) as client:
            began_s = time.monotonic()
            answers = [client.post("/v2/models/toy/infer", json=body(rows(1))) for _ in range(50)]
            assert time.monotonic() - began_s < 30.0, "less than a second each: nobody waits for a second try"
        assert all(answer.status_code == 200 for answer in answers)
