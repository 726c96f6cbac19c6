"""Unary gRPC calls on a replica's own HTTP listener, without the gRPC server.

The methods of ``GrpcMethods`` answer them. Inference by one version goes to its batcher without a task. If a request is
wrong or not plain, the method answers it.
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from google.protobuf.message import DecodeError, Message
from grpc import StatusCode
from tritonclient.grpc import service_pb2 as pb

from app.errors import DeadlineError, OverloadError, RequestError, RequestTooLargeError, UnauthorizedError, short_repr
from app.serving.protocol.compression import MAX_INFLATION, is_compressed
from app.serving.protocol.grpc import require_readable
from app.serving.protocol.infer import LIMITS
from app.serving.reading import ON_LOOP_BYTES
from app.serving.traffic import Outcome, outcome_of
from app.serving.transport.asgi import too_slow
from app.serving.transport.call_head import ENCODINGS, CallHead
from app.serving.transport.errors import refusal
from app.serving.transport.exchange import Exchange
from app.serving.transport.grpc import OPEN_CALLS, SERVICE, GrpcMethods, received_bytes, traceparent_of
from app.serving.transport.http import DirectInference
from app.serving.transport.prepared_calls import PreparedCall, PreparedCalls
from app.tensors import Tensors

_PREFIX_BYTES = 5
_MAX_DETAILS = 2730
"""Limit on an error message in bytes. Percent-encoding may triple it, and HAProxy takes no header above 15 KiB."""
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_MAX_CALLERS, _MAX_CALLER_BYTES = 1024, 1024
_MAX_OPEN_BYTES = 4096
"""Limit on a message to a method that needs no token."""
_MAX_OTHER_BYTES = 2**20
"""Limit on a message to a method other than inference. Those methods take only names."""


@dataclass(frozen=True, slots=True)
class _Method:
    """A method of the service."""

    request: type[Message]
    call: Callable[[Any, Any], Awaitable[Message]]
    is_inference: bool
    is_open: bool
    """Whether everybody may call it."""

    @property
    def max_bytes(self) -> int:
        """The maximum size of its message, received or decompressed."""
        if self.is_inference:
            return LIMITS.body_bytes
        return _MAX_OPEN_BYTES if self.is_open else _MAX_OTHER_BYTES


class Answers(Protocol):
    """The sender of a connection's answers. It ends a call once its answer is sent."""

    peer: str
    """The client's address, as gRPC writes it."""

    def respond(self, call: "UnaryCall", content: bytes) -> None:
        """Send a message as the answer to a call, unless it has one."""

    def refuse(self, call: "UnaryCall", trailers: list[tuple[str, str]]) -> None:
        """Answer a call with an error, unless it has an answer."""

    def refuse_http(self, call: "UnaryCall") -> None:
        """Answer a request that is not a gRPC call."""


class UnaryService:
    """The shared state of a listener's calls."""

    def __init__(self, methods: GrpcMethods, direct: DirectInference) -> None:
        """Answer with ``methods``, within the limits of ``direct`` on concurrent requests and bytes."""
        self.direct = direct
        self.traffic = direct.endpoint.traffic
        self.answered = 0
        """The number of calls, including refused ones."""
        self.inferred = 0
        """The number of calls that needed no task."""
        self.reader = direct.endpoint.reader
        self.prepared = PreparedCalls()
        self._methods = {
            f"/{SERVICE.full_name}/{method.name}": _Method(
                getattr(pb, method.input_type.name),
                getattr(methods, method.name),
                method.name == "ModelInfer",
                method.name in OPEN_CALLS,
            )
            for method in SERVICE.methods
            if not method.client_streaming
        }
        self._check_caller = methods.check_caller
        self._config = direct.endpoint.config
        self._callers: set[tuple[str, tuple[bytes | None, ...]]] = set()

    def begin(self, answers: Answers, head: CallHead) -> "UnaryCall":
        """Start a call. Its answer goes to ``answers``."""
        self.answered += 1
        return UnaryCall(self, answers, head, self._methods.get(head.path))

    def check_caller(self, call: "UnaryCall") -> None:
        """Raise UnauthorizedError if the endpoint does not answer this caller."""
        self.forget_replaced()
        caller = call.peer(), call.head.caller
        # Callers are remembered, because the check hashes the token.
        if caller not in self._callers:
            self._check_caller(call)
            # Long headers are checked each time and not cached, so that callers cannot fill the memory.
            if sum(map(len, filter(None, call.head.caller))) > _MAX_CALLER_BYTES:
                return
            if len(self._callers) >= _MAX_CALLERS:
                self._callers.clear()
            self._callers.add(caller)

    def forget_replaced(self) -> None:
        """Drop callers and messages if the models or the token were replaced."""
        if self._config is not self.direct.endpoint.config:
            self._config = self.direct.endpoint.config
            self._callers.clear()
            self.prepared.clear()


class UnaryCall(Exchange):
    """A call. ``CallConnection`` passes the body to it, and it is the ``Context`` of its method."""

    __slots__ = (
        "_answers", "_code", "_data", "_deadline", "_details", "_has_entered", "_held", "_id", "_is_over", "_method",
        "_number", "_prepared", "_received", "_service", "_task", "_trailing", "head",
    )  # fmt: skip

    def __init__(self, service: UnaryService, answers: Answers, head: CallHead, method: _Method | None) -> None:
        super().__init__()
        self.head = head
        self._service = service
        self._answers = answers
        self._method = method
        self._data: bytes | bytearray = b""
        self._held = 0  # bytes that the service counts for this call
        self._received = 0  # bytes of the message as it was sent
        self._number = -1  # of its body, while it is awaited
        self._has_entered = self._is_over = False
        self._prepared: PreparedCall | None = None
        self._id: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._code, self._details = StatusCode.OK, ""
        self._trailing: Sequence[tuple[str, str]] = ()
        self._deadline: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Refuse an unauthorized call, or one with an unknown method or compression or an invalid timeout."""
        if not self.head.is_grpc:
            self._answers.refuse_http(self)
            return
        if self._method is None:
            path = short_repr(self.head.path)
            self._end(StatusCode.UNIMPLEMENTED, f"{path} is not a unary method of {SERVICE.full_name}")
            return
        if self.head.encoding not in ENCODINGS:
            encoding = short_repr(self.head.encoding)
            self._end(StatusCode.UNIMPLEMENTED, f"grpc-encoding is {encoding}: expected {', '.join(ENCODINGS)}")
            return
        try:
            if not self._method.is_open:
                self._service.check_caller(self)
            if self.head.wrong_timeout is not None:
                raise RequestError(f"grpc-timeout is {short_repr(self.head.wrong_timeout)}: expected, for example, 10S")
        except (UnauthorizedError, RequestError) as error:
            self._refuse_early(error)
            return
        limit = self._service.direct.endpoint.config.max_requests
        self._number = self._service.direct.awaited.number()
        self._service.direct.awaited.add(self._number, lambda: self.refuse(too_slow(limit)), limit)
        if self.head.timeout_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(self.head.timeout_s, self._expire_deadline)

    def receive(self, data: bytes) -> None:
        """Take a part of the message. Refuse a message that is too large before it has arrived."""
        if self._is_over or self._method is None:
            return
        try:
            self._hold(len(data))
            # Most messages arrive in one part, which is kept without a copy.
            if isinstance(self._data, bytearray):
                self._data += data
            else:
                self._data = bytearray(self._data + data) if self._data else data
            size = int.from_bytes(self._data[1:_PREFIX_BYTES], "big")
            if len(self._data) >= _PREFIX_BYTES and size > self._method.max_bytes:
                raise RequestTooLargeError(f"a message of {size} bytes: at most {self._method.max_bytes}")
            if len(self._data) > _PREFIX_BYTES + size:
                raise RequestError(f"the call continues after a message of {size} bytes: send one message")
        except (OverloadError, RequestError) as error:
            self.refuse(error)

    def finish(self) -> None:
        """Answer the call."""
        if self._is_over or self._method is None:
            return
        self._service.direct.awaited.discard(self._number)
        try:
            is_compressed, message = self._message()
            if self._method.is_inference:
                self._service.direct.enter()
                self._has_entered = True
            if is_compressed:
                # Reserve for the worst case, because the decompressed size is known only after the memory is used.
                self._hold(max(0, min(MAX_INFLATION * len(message), self._method.max_bytes) - self._held))
                self._task = asyncio.get_running_loop().create_task(self._inflate(self._method, message))
            else:
                self._proceed(self._method, message)
        except (OverloadError, RequestError) as error:
            self._refuse_early(error)

    def expire(self) -> None:
        """Refuse the call. The rest of its message did not arrive in time."""
        self.refuse(TimeoutError("the message did not arrive in time: send it faster"))

    def end(self) -> None:
        """Free the call's room, and stop waiting."""
        self._service.direct.awaited.discard(self._number)
        self._stop()
        if self._has_entered:
            self._service.direct.leave(self._held)
        else:
            self._service.direct.release(self._held)
        self._held, self._has_entered, self._is_over = 0, False, True

    def answer(self, outputs: Tensors) -> None:
        assert self._prepared is not None
        content = self._prepared.write(outputs, self._id)
        self._count("ok", len(content))
        self._respond(content)

    def refuse(self, error: Exception) -> None:
        self._count(outcome_of(error))
        reply = refusal(error)
        after = [] if reply.retry_after_s is None else [("retry-after", str(reply.retry_after_s))]
        self._end(reply.grpc, reply.message, after)

    def set_code(self, code: StatusCode) -> None:
        """Set the status of the call."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Set the error message of the call."""
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        """Set the metadata that is sent at the end."""
        self._trailing = trailing_metadata

    def invocation_metadata(self) -> Iterable[tuple[str, str]]:
        """Return the metadata that came with the call."""
        return self.head.metadata

    def peer(self) -> str:
        """Return the client's address."""
        return self._answers.peer

    def _hold(self, num_bytes: int) -> None:
        """Count bytes until the call ends. Raises OverloadError if there is no room for them."""
        self._service.direct.hold(num_bytes)
        self._held += num_bytes

    def _message(self) -> tuple[bool, bytes]:
        """Return whether the call's message is compressed, and its bytes.

        Raises:
            RequestError: the call does not have exactly one whole message, or does not say how it is compressed.
        """
        prefix, message = self._data[:_PREFIX_BYTES], bytes(memoryview(self._data)[_PREFIX_BYTES:])
        self._data = b""
        size, self._received = int.from_bytes(prefix[1:], "big"), len(message)
        if len(prefix) < _PREFIX_BYTES or len(message) != size:
            raise RequestError(f"the call has {len(message)} of {size} bytes of a message: send one whole message")
        if prefix[0] > 1:
            raise RequestError(f"the message begins with the byte {prefix[0]}: expected 0, or 1 if it is compressed")
        if prefix[0] and not is_compressed(self.head.encoding):
            raise RequestError("the message is compressed, but grpc-encoding does not say how")
        return bool(prefix[0]), message

    async def _inflate(self, method: _Method, message: bytes) -> None:
        """Decompress the message outside the event loop, and proceed with its content."""
        try:
            content = await self._service.reader.inflate(message, self.head.encoding, method.max_bytes)
            self._hold(len(content) - self._held)
            self._proceed(method, content)
        except Exception as error:
            self._refuse_early(error)

    def _proceed(self, method: _Method, content: bytes) -> None:
        """Submit the call, or run it in a task.

        Raises:
            OverloadError: its queue is full.
            RequestError: the message would take too long to read.
        """
        num_bytes = require_readable(content)
        if not (method.is_inference and num_bytes <= ON_LOOP_BYTES and self._submit(content)):
            self._task = asyncio.get_running_loop().create_task(self._run(method, content, num_bytes))

    def _submit(self, content: bytes) -> bool:
        """Submit a ModelInferRequest if a single version answers it. Return False if not, or on an error.

        Raises:
            OverloadError: its queue is full.
        """
        service = self._service
        try:
            service.forget_replaced()
            message = pb.ModelInferRequest.FromString(content)
            served = service.direct.endpoint.route_single(message.model_name, message.model_version or None)
            if served is None:
                return False
            # Note the id first: ``read`` may remove it from the message.
            self._id = message.id or None
            self._prepared, tensors = service.prepared.read(served, message, len(content))
        except Exception:  # the method meets the same error and reports it
            return False
        known = self._prepared.prepared
        if tracer := service.traffic.tracer:
            self.trace = tracer.begin("grpc", traceparent_of(self))
        self.submit(served, tensors, known.rows, known.shape, known.request.parameters)
        service.inferred += 1
        return True

    async def _run(self, method: _Method, content: bytes, num_bytes: int) -> None:
        try:
            received_bytes.set(self._received)
            request = await self._service.reader.read(
                num_bytes, lambda: _parsed(method.request, content), self._received
            )
            message = await method.call(request, self)
            if self._code is StatusCode.OK:
                self._respond(message.SerializeToString())
            else:
                self._end(self._code, self._details, self._trailing)
        except Exception as error:
            self.refuse(error)

    def _expire_deadline(self) -> None:
        self.refuse(DeadlineError("the call's grpc-timeout has passed"))

    def _respond(self, content: bytes) -> None:
        """Send an answer. Raises OverloadError if there is no room for it until it is sent."""
        if not self._is_over:
            self._stop()
            # The answer takes the room of the request, which was dropped.
            self._hold(len(content) - self._held)
            self._answers.respond(self, content)

    def _end(self, code: StatusCode, details: str, trailing: Sequence[tuple[str, str]] = ()) -> None:
        """End the call with an error."""
        message = quote(details.encode()[:_MAX_DETAILS], _PRINTABLE)
        self._answers.refuse(self, [("grpc-status", str(code.value[0])), ("grpc-message", message), *trailing])

    def _refuse_early(self, error: Exception) -> None:
        """Refuse a call before it is known which model it is for."""
        if self._prepared is None and self._method and self._method.is_inference:
            self._service.traffic.add("", "", "grpc", outcome_of(error))
        self.refuse(error)

    def _count(self, outcome: Outcome, sent: int = 0) -> None:
        """Count a call that went to a batcher, once. The other calls are counted by their method."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            model, version = prepared.prepared.request.model, prepared.prepared.served.version
            self._service.traffic.add(model, version, "grpc", outcome, self._received, sent)
            if self.trace:
                self.trace.end(model, version, outcome)

    def _stop(self) -> None:
        """Stop waiting, and drop the request."""
        # This counts nothing if the call was counted already.
        self._count("cancelled")
        self.give_up()
        if self._deadline:
            self._deadline.cancel()
        # The task itself may be sending the answer.
        if self._task and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = self._deadline = None
        self._data = b""


def _parsed(kind: type[Message], content: bytes) -> Message | None:
    """Parse a message; return None if it cannot be parsed, which its method refuses."""
    try:
        return kind.FromString(content)
    except DecodeError:
        return None
