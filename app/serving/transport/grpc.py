"""An endpoint over gRPC: the methods of ``inference.GRPCInferenceService``.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/open_inference_grpc.proto
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import StatusCode
from tritonclient.grpc import service_pb2 as pb

from app.errors import OverloadError, RequestError, UnauthorizedError, UnsupportedError
from app.serving.access import Caller, combine
from app.serving.protocol.grpc import (
    bytes_to_read,
    read_infer,
    require_readable,
    write_infer,
    write_stream_error,
    write_stream_infer,
)
from app.serving.protocol.grpc_management import (
    read_index,
    read_load,
    read_unload,
    write_index,
    write_model_metadata,
    write_server_metadata,
    write_statistics,
)
from app.serving.protocol.infer import InferRequest
from app.serving.protocol.management import Statistics
from app.serving.protocol.model_config import model_config
from app.serving.transport.errors import refusal
from app.serving.transport.inference_call import Admission, InferenceCall
from app.tensors import TensorSpec

_MAX_AHEAD = 32
"""Concurrent requests of one stream. With several, they can share calls of the engine."""
INFER = "ModelInfer"
OPEN_METHODS = ("ServerLive", "ServerReady")
"""Methods without access control, for the health checks of load balancers."""
SERVICER = "app.serving.transport.grpc.add_to_server"
"""The import path of the function that registers the service with a server."""

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
for _message in pb.DESCRIPTOR.message_types_by_name:
    # Serve's own proxy pickles messages, and the module name in the generated code cannot be imported.
    getattr(pb, _message).__module__ = pb.__name__


class Context(Protocol):
    """The methods of gRPC's context of a call that are used here."""

    def set_code(self, code: StatusCode) -> None:
        """Set the status of the call."""

    def set_details(self, details: str) -> None:
        """Set the error message of the call."""

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        """Set the metadata that is sent at the end."""

    def invocation_metadata(self) -> Iterable[tuple[str, str]]:
        """Return the metadata that came with the call."""

    def peer(self) -> str:
        """Return the caller's address."""


RequestMessage = TypeVar("RequestMessage", bound=Message)
Answer = TypeVar("Answer", bound=Message)
Item = TypeVar("Item")
Result = TypeVar("Result")


def _answers(
    kind: type[Answer],
) -> Callable[
    [Callable[[Any, RequestMessage], Awaitable[Answer]]],
    Callable[[Any, RequestMessage | None, Context], Awaitable[Answer]],
]:
    """Decorate a method: check the caller, then answer. An error becomes the status, with an empty message.

    The method itself stays reachable as ``answer``, for callers that were checked.
    """

    def decorate(
        method: Callable[[Any, RequestMessage], Awaitable[Answer]],
    ) -> Callable[[Any, RequestMessage | None, Context], Awaitable[Answer]]:
        async def call(service: Any, request: RequestMessage | None, grpc_context: Context) -> Answer:
            try:
                if method.__name__ not in OPEN_METHODS:
                    service.require_access(grpc_context)
                return await method(service, _require_parsed(request))
            except Exception as error:
                _end(grpc_context, error)
                empty: Answer = kind()
                return empty

        # ``functools.wraps`` would hide ``grpc_context``, which Serve looks for in the signature.
        call.__doc__ = method.__doc__
        call.answer = method  # type: ignore[attr-defined]
        return call

    return decorate


def _end(grpc_context: Context, error: Exception) -> None:
    """End the call with an error."""
    reply = refusal(error)
    grpc_context.set_code(reply.grpc)
    grpc_context.set_details(reply.message)
    grpc_context.set_trailing_metadata(reply.trailers)


def parse(kind: type[RequestMessage], content: bytes) -> RequestMessage:
    """Return a message. Raises RequestError if it cannot be parsed."""
    try:
        message: RequestMessage = kind.FromString(content)
    except DecodeError:
        raise _unreadable() from None
    return message


def _require_parsed(request: RequestMessage | None) -> RequestMessage:
    if request is None:
        raise _unreadable()
    return request


def _unreadable() -> RequestError:
    return RequestError(
        "the message cannot be parsed, or has too many parts: send one of inference.GRPCInferenceService, and large "
        "tensors in raw_input_contents"
    )


async def infer(call: InferenceCall, message: pb.ModelInferRequest, num_bytes: int) -> pb.ModelInferResponse:
    """Answer a request for inference, whose message has ``num_bytes``. Raises as the endpoint does."""

    async def read(inputs: Sequence[TensorSpec]) -> InferRequest:
        to_read = bytes_to_read(message, num_bytes, inputs)
        return await call.admission.endpoint.reader.read(to_read, lambda: read_infer(message, inputs), call.received)

    request, target = await call.route(message.model_name, message.model_version or None, read)
    answer = write_infer(await call.run(target.infer(request)))
    call.sent = answer.ByteSize()
    return answer


class GrpcMethods:
    """The service. Its methods have the names and messages of the protocol."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._endpoint = admission.endpoint
        self._streams, self._streamed = 0, 0  # open streams, and their requests that are being answered

    def require_access(self, grpc_context: Context) -> None:
        """Raise UnauthorizedError if the endpoint does not answer this caller."""
        # Values under these names are bytes, which are not used here.
        lines = [line for line in grpc_context.invocation_metadata() if not line[0].endswith("-bin")]
        self._admission.require_access(Caller.of(combine(lines, ", ")), grpc_context.peer())

    @_answers(pb.ServerLiveResponse)
    async def ServerLive(self, _: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """Return true: the server runs."""
        return pb.ServerLiveResponse(live=True)

    @_answers(pb.ServerReadyResponse)
    async def ServerReady(self, _: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Return true: a server gets no requests before every model is loaded."""
        return pb.ServerReadyResponse(ready=True)

    @_answers(pb.ServerMetadataResponse)
    async def ServerMetadata(self, _: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """Return the name and version of the server."""
        return write_server_metadata(self._endpoint.metadata)

    @_answers(pb.ModelReadyResponse)
    async def ModelReady(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Return whether a model is loaded."""
        return pb.ModelReadyResponse(ready=self._endpoint.serves(request.name, request.version or None))

    @_answers(pb.ModelMetadataResponse)
    async def ModelMetadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """Return the inputs and outputs of a model."""
        return write_model_metadata(self._endpoint.model_metadata(request.name, request.version or None))

    @_answers(pb.ModelConfigResponse)
    async def ModelConfig(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """Return a model's configuration in Triton's format."""
        served = self._endpoint.find(request.name, request.version or None)
        return pb.ModelConfigResponse(config=model_config(served.model.manifest, served.policy))

    @_answers(pb.ModelStatisticsResponse)
    async def ModelStatistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """Return the statistics of a model, or of all models."""
        statistics = self._endpoint.statistics(request.name or None, request.version or None)
        return write_statistics(Statistics(model_stats=statistics))

    @_answers(pb.RepositoryIndexResponse)
    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """Return all served models."""
        read_index(request)
        return write_index(self._endpoint.index)

    @_answers(pb.RepositoryModelLoadResponse)
    async def RepositoryModelLoad(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        """Do nothing if the model is served. See ``Endpoint.load``."""
        read_load(request)
        self._endpoint.load(request.model_name)
        return pb.RepositoryModelLoadResponse()

    @_answers(pb.RepositoryModelUnloadResponse)
    async def RepositoryModelUnload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        """Refuse. See ``Endpoint.unload``."""
        read_unload(request)
        self._endpoint.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()

    async def ModelInfer(self, request: pb.ModelInferRequest | None, grpc_context: Context) -> pb.ModelInferResponse:
        """Run inference on tensors."""
        try:
            with InferenceCall(self._admission, "grpc") as call, call.counted():
                self.require_access(grpc_context)
                return await self._infer(call, request, _traceparent_of(grpc_context))
        except Exception as error:
            _end(grpc_context, error)
            return pb.ModelInferResponse()

    async def ModelStreamInfer(
        self, request_stream: AsyncIterator[pb.ModelInferRequest | None], grpc_context: Context
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """Run inference on a stream of requests, and answer in order. A refused request does not end the stream."""
        try:
            self.require_access(grpc_context)
            self._check_streams()
        except (UnauthorizedError, OverloadError) as error:
            InferenceCall(self._admission, "grpc").count(error)
            _end(grpc_context, error)
            return
        answer = partial(self._answer_in_stream, _traceparent_of(grpc_context))
        self._streams += 1
        try:
            async with aclosing(answer_in_order(request_stream, answer, self._max_ahead)) as answers:
                async for response in answers:
                    yield response
        finally:
            self._streams -= 1

    @property
    def unseen_by_serve(self) -> int:
        """The number of requests here that Serve does not count. It counts each stream as one request."""
        return self._admission.ongoing - min(self._streamed, self._streams)

    @property
    def _max_ahead(self) -> int:
        """The limit on concurrent requests of a stream. A stream must not fill a queue by itself."""
        versions = self._endpoint.config.versions
        return min([_MAX_AHEAD, *(1 + version.policy.queue_limit // 2 for version in versions)])

    def _check_streams(self) -> None:
        """Raise OverloadError if streams take half of the slots. Serve gives an open stream one request's slot."""
        if self._streams >= self._admission.max_requests // 2:
            raise OverloadError(f"{self._streams} streams are open already: end one, or send requests by themselves")

    async def _answer_in_stream(
        self, traceparent: str | None, request: pb.ModelInferRequest | None
    ) -> pb.ModelStreamInferResponse:
        self._streamed += 1
        try:
            with InferenceCall(self._admission, "grpc") as call, call.counted():
                call.enter()
                return write_stream_infer(await self._infer(call, request, traceparent))
        except Exception as error:
            return write_stream_error(refusal(error).message, request and request.id)
        finally:
            self._streamed -= 1

    async def _infer(
        self, call: InferenceCall, request: pb.ModelInferRequest | None, traceparent: str | None
    ) -> pb.ModelInferResponse:
        """Answer a message that gRPC's own server has parsed. That server does not tell a compressed size."""
        call.begin_trace(traceparent)
        message = _require_parsed(request)
        call.received = message.ByteSize()
        call.hold(call.received)
        return await infer(call, message, call.received)


def _traceparent_of(grpc_context: Context) -> str | None:
    """Return the client's span, if it sent one."""
    return dict(grpc_context.invocation_metadata()).get("traceparent")


def _unsupported(name: str, kind: type[Message]) -> Callable[[Any, Any, Context], Awaitable[Message]]:
    async def call(_: Any, __: Message) -> Message:
        raise UnsupportedError(f"{name} is not supported")

    call.__name__ = name
    return _answers(kind)(call)


for _method in SERVICE.methods:
    # ``add_to_server`` looks up every method of the service, also those without an implementation here.
    if not hasattr(GrpcMethods, _method.name):  # shared memory, tracing, log settings
        setattr(GrpcMethods, _method.name, _unsupported(_method.name, getattr(pb, _method.output_type.name)))


def add_to_server(service: Any, server: grpc.aio.Server) -> None:
    """Register the service, as the generated code does, with one difference.

    Methods get None for a message that cannot be parsed or would take too long. gRPC itself would log a traceback and
    answer UNKNOWN.
    """
    handlers = {
        method.name: (
            grpc.stream_stream_rpc_method_handler if method.client_streaming else grpc.unary_unary_rpc_method_handler
        )(
            getattr(service, method.name),
            request_deserializer=_parser(getattr(pb, method.input_type.name)),
            response_serializer=getattr(pb, method.output_type.name).SerializeToString,
        )
        for method in SERVICE.methods
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))


def _parser(kind: type[RequestMessage]) -> Callable[[bytes], RequestMessage | None]:
    def read(message: bytes) -> RequestMessage | None:
        try:
            require_readable(message)
            return parse(kind, message)
        except RequestError:
            return None

    return read


async def answer_in_order(
    requests: AsyncIterator[Item], answer: Callable[[Item], Coroutine[Any, Any, Result]], max_ahead: int
) -> AsyncGenerator[Result, None]:
    """Yield the answers to a stream of requests, in order. At most ``max_ahead`` requests run at a time.

    Closing the generator cancels the requests that run. An error of ``requests`` or ``answer`` ends it.
    """
    answers: asyncio.Queue[asyncio.Task[Result] | None] = asyncio.Queue()
    room = asyncio.Semaphore(max_ahead)
    running: set[asyncio.Task[Any]] = set()  # the event loop itself holds tasks only weakly

    def start(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        running.add(task)
        task.add_done_callback(running.discard)
        return task

    async def read() -> None:
        try:
            async for request in requests:
                await room.acquire()
                answers.put_nowait(start(answer(request)))
        finally:
            # The loop below has to end after an error, too. Then ``await reading`` raises it.
            answers.put_nowait(None)

    reading = start(read())
    try:
        while (task := await answers.get()) is not None:
            yield await task
            # Room is released only now, so that a client that reads slowly holds back its own requests.
            room.release()
        await reading
    finally:
        for task in list(running):
            task.cancel()
