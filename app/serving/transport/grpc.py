"""An endpoint over gRPC: the methods of ``inference.GRPCInferenceService``.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/open_inference_grpc.proto
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeVar

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
from app.serving.transport.errors import PassedRefusalError, refusal
from app.serving.transport.inference_call import Admission, InferenceCall
from app.serving.transport.passing import CallAnswer, PassedCall, Pools, PoolState
from app.tensors import TensorSpec

_MAX_AHEAD = 32
"""Concurrent requests of one stream. With several, they can share calls of the engine."""
INFER = "ModelInfer"
_INDEX = "RepositoryIndex"
_LISTS = ("ModelStatistics", _INDEX)
"""Methods that list all models if their message names none."""
_STATE = ("ModelReady", "ModelStatistics")
"""Methods for a model's state, which monitoring polls."""
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


class Origin(NamedTuple):
    """Where a call comes from."""

    metadata: tuple[tuple[str, str], ...]
    peer: str

    @classmethod
    def of(cls, grpc_context: Context) -> Self:
        """Return the origin of a call that gRPC's own server has received."""
        # Values under these names are bytes, which are not used here.
        lines = [line for line in grpc_context.invocation_metadata() if not line[0].endswith("-bin")]
        return cls(tuple(lines), grpc_context.peer())

    @property
    def traceparent(self) -> str | None:
        """The client's span, if it sent one."""
        return dict(self.metadata).get("traceparent")


@dataclass
class PassedContext:
    """The context of a call that another pool's replica has passed on."""

    origin: Origin
    code: StatusCode = StatusCode.OK
    details: str = ""
    trailers: tuple[tuple[str, str], ...] = ()

    def set_code(self, code: StatusCode) -> None:
        """Set the status of the call."""
        self.code = code

    def set_details(self, details: str) -> None:
        """Set the error message of the call."""
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        """Set the metadata that is sent at the end."""
        self.trailers = tuple(trailing_metadata)

    def invocation_metadata(self) -> Iterable[tuple[str, str]]:
        """Return the metadata that came with the call."""
        return self.origin.metadata

    def peer(self) -> str:
        """Return the caller's address."""
        return self.origin.peer


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
                message: RequestMessage = _require_parsed(request)
                origin = Origin.of(grpc_context)
                answered: tuple[Answer, str | None] = await service.answer_or_pass_on(
                    method.__name__, message, origin, lambda: method(service, message)
                )
                return answered[0]
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
    ).of("message.unreadable")


async def infer(call: InferenceCall, message: pb.ModelInferRequest, num_bytes: int) -> pb.ModelInferResponse:
    """Answer a request for inference, whose message has ``num_bytes``. Raises as the endpoint does."""

    async def read(inputs: Sequence[TensorSpec]) -> InferRequest:
        to_read = bytes_to_read(message, num_bytes, inputs)
        return await call.admission.endpoint.reader.read(to_read, lambda: read_infer(message, inputs), call.received)

    request, target = await call.route(message.model_name, message.model_version or None, read, takes_tensors=True)
    answer = write_infer(await call.run(target.infer(request)))
    call.sent = answer.ByteSize()
    return answer


class GrpcMethods:
    """The service. Its methods have the names and messages of the protocol."""

    def __init__(self, admission: Admission, pools: Pools | None = None) -> None:
        """Answer what ``admission`` admits, and pass on what ``pools`` answer."""
        self._admission = admission
        self._endpoint = admission.endpoint
        self._pools = pools
        self._streams, self._streamed = 0, 0  # open streams, and their requests that are being answered

    def require_access(self, grpc_context: Context) -> None:
        """Raise UnauthorizedError if the endpoint does not answer this caller."""
        origin = Origin.of(grpc_context)
        self._admission.require_access(Caller.of(combine(origin.metadata, ", ")), origin.peer)

    def passes_on(self, message: Message) -> bool:
        """Return whether another pool has the model that a message names."""
        return self._pools is not None and model_of(message) in self._endpoint.config.elsewhere

    async def answer_or_pass_on(
        self, method: str, message: Message, origin: Origin, here: Callable[[], Awaitable[Answer]]
    ) -> tuple[Answer, str | None]:
        """Return the answer of the pool that has the message's model, and the pool; None: ``here`` gave the answer.

        A method that lists all models lists those of other pools, too. Neither lists nor a model's state wake a
        sleeping pool.

        Raises:
            PassedRefusalError: the other pool refuses the call.
            OverloadError: none of its replicas answers.
        """
        elsewhere, name = self._endpoint.config.elsewhere, model_of(message)
        if self._pools is None or not elsewhere:
            return await here(), None
        if pool := elsewhere.get(name):
            if method in _STATE and not message.version and await self._pools.state_of(pool) is PoolState.ASLEEP:
                return await here(), None
            return await self._ask(pool, method, message, origin), pool
        answer = await here()
        if method in _LISTS and not name:
            others = sorted(set(elsewhere.values()))
            states = await asyncio.gather(*(self._pools.state_of(other) for other in others))
            for other, state in zip(others, states, strict=True):
                reason = f"pool {other} {state}"
                if state is PoolState.AWAKE:
                    try:
                        answer.MergeFrom(await self._ask(other, method, message, origin))
                        continue
                    except (PassedRefusalError, OverloadError) as error:
                        reason = str(error)
                if method == _INDEX and not message.ready:
                    answer.MergeFrom(write_index(self._endpoint.index_of(other, reason)))
        return answer, None

    async def _ask(self, pool: str, method: str, message: Message, origin: Origin) -> Any:
        assert self._pools is not None
        call = PassedCall(method, message.SerializeToString(), origin.metadata, origin.peer)
        answer = await self._pools.call(pool, call)
        if answer.code != StatusCode.OK.value[0]:
            raise PassedRefusalError(answer.refusal)
        return getattr(pb, SERVICE.methods_by_name[method].output_type.name).FromString(answer.message)

    async def answer_passed(self, call: PassedCall) -> CallAnswer:
        """Return the answer to a call that another pool's replica has passed on."""
        context = PassedContext(Origin(call.metadata, call.peer))
        message = parse(getattr(pb, SERVICE.methods_by_name[call.method].input_type.name), call.message)
        answer: Message = await getattr(self, call.method)(message, context)
        return CallAnswer(answer.SerializeToString(), context.code.value[0], context.details, context.trailers)

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
        await self._endpoint.load_on_demand(request.name)
        return write_model_metadata(self._endpoint.model_metadata(request.name, request.version or None))

    @_answers(pb.ModelConfigResponse)
    async def ModelConfig(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """Return a model's configuration in Triton's format."""
        await self._endpoint.load_on_demand(request.name)
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
        ready = read_index(request).ready
        return write_index([model for model in self._endpoint.index if model.state == "READY" or not ready])

    @_answers(pb.RepositoryModelLoadResponse)
    async def RepositoryModelLoad(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        """Do nothing if the model is served. See ``Endpoint.load``."""
        read_load(request)
        await self._endpoint.load(request.model_name)
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
            if (passed := await self._passed_inference(request, grpc_context)) is not None:
                return passed
            with InferenceCall(self._admission, "grpc") as call, call.counted():
                self.require_access(grpc_context)
                return await self._infer(call, request, Origin.of(grpc_context).traceparent)
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
        answer = partial(self._answer_in_stream, grpc_context)
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
        self, grpc_context: Context, request: pb.ModelInferRequest | None
    ) -> pb.ModelStreamInferResponse:
        self._streamed += 1
        try:
            if (passed := await self._passed_inference(request, grpc_context)) is not None:
                return write_stream_infer(passed)
            with InferenceCall(self._admission, "grpc") as call, call.counted():
                call.enter()
                return write_stream_infer(await self._infer(call, request, Origin.of(grpc_context).traceparent))
        except Exception as error:
            return write_stream_error(refusal(error).message, request and request.id)
        finally:
            self._streamed -= 1

    async def _passed_inference(
        self, request: pb.ModelInferRequest | None, grpc_context: Context
    ) -> pb.ModelInferResponse | None:
        """Return another pool's answer; None if this pool answers. Raises as ``answer_or_pass_on``."""
        if (
            request is None
            or self._pools is None
            or not (pool := self._endpoint.config.elsewhere.get(request.model_name))
        ):
            return None
        self.require_access(grpc_context)
        answer: pb.ModelInferResponse = await self._ask(pool, INFER, request, Origin.of(grpc_context))
        return answer

    async def _infer(
        self, call: InferenceCall, request: pb.ModelInferRequest | None, traceparent: str | None
    ) -> pb.ModelInferResponse:
        """Answer a message that gRPC's own server has parsed. That server does not tell a compressed size."""
        call.begin_trace(traceparent)
        message = _require_parsed(request)
        call.received = message.ByteSize()
        call.hold(call.received)
        return await infer(call, message, call.received)


def model_of(message: Message) -> str:
    """Return the model that a message names; an empty text if it names none."""
    return getattr(message, "model_name", "") or getattr(message, "name", "")


def _unsupported(name: str, kind: type[Message]) -> Callable[[Any, Any, Context], Awaitable[Message]]:
    async def call(_: Any, __: Message) -> Message:
        raise UnsupportedError(f"{name} is not supported").of("method.unsupported")

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
