"""Traces of requests and jobs, as a collector gets them: OpenTelemetry's protocol over HTTP on loopback."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import tritonclient.grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from upath import UPath

from app.cluster.ports import unused
from app.config import load_recipe
from app.errors import OverloadError, RecipeError
from app.runs import Run, execute
from app.telemetry import tracing
from app.telemetry.tracing import RequestTracer, find_tracer
from tests.engine_contract import exported, rows
from tests.helpers import ROOT, run
from tests.receiver import HttpReceiver
from tests.serving import Server, serving
from tests.toy import answering, asked, body, config, publish

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED, UNTRACED = f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00"


class Collector:
    """What a collector was sent."""

    def __init__(self, receiver: HttpReceiver) -> None:
        self._receiver = receiver

    def spans(self) -> list[Span]:
        """All spans, once those that have ended are sent."""
        tracing.flush()
        requests = [ExportTraceServiceRequest.FromString(content) for _, content in self._receiver.requests]
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
    tracing._provider.cache_clear()


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
    assert server.route.answered == 3  # all took the short way
    spans = {span.name: span for span in collector.spans()}
    assert spans.keys() == {"request", "queue", "batch", "engine"}
    request, batch = spans["request"], spans["batch"]
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    assert request.parent_span_id.hex() == SPAN_ID
    assert answered.headers["traceparent"] == f"00-{TRACE_ID}-{request.span_id.hex()}-01"
    assert attributes(request) == {"rpc.system": "http", "model": "toy", "version": "1", "outcome": "ok"}
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
    requests = collector.named("request")
    assert [attributes(span)["rpc.system"] for span in requests] == ["grpc", "natural"]
    assert {span.trace_id.hex() for span in requests} == {TRACE_ID}
    assert len(collector.named("engine")) == 2


def test_a_request_that_is_refused_has_its_outcome(
    server: Server, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OverloadError("full"))
    monkeypatch.setattr(server.endpoint.find("toy").batcher, "submit", full)
    assert post(server, TRACED).status_code == 503
    (request,) = collector.named("request")
    assert attributes(request)["outcome"] == "overload"
    assert request.status.code == request.status.STATUS_CODE_ERROR
    assert [event.name for event in request.events] == ["exception"]


def test_a_request_that_fails_has_its_error(server: Server, collector: Collector) -> None:
    httpx.post(f"http://{server.http}/v2/models/toy/infer", json={"inputs": []}, headers={"traceparent": TRACED})
    (request,) = collector.named("request")
    assert request.status.code == request.status.STATUS_CODE_ERROR
    assert [event.name for event in request.events] == ["exception"]


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
            assert time.monotonic() - began_s < 5.0
        assert all(answer.status_code == 200 for answer in answers)
