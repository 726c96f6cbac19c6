"""Every error that Rayloom raises on purpose.

RayloomError
├── RecipeError            the recipe, an override or a name in it is wrong
├── DataError              the data cannot be read, or contradicts the recipe
│   └── BrokerUnreachableError  the broker of a stream does not answer
├── StorageError           a place in storage is missing, taken or damaged
│   └── UnsharedStorageError  a node cannot see files that another node wrote
├── ClusterError           the local cluster is not in the state that a command needs
│   └── NoClusterError     no cluster is up
├── TrainingError          training cannot start or continue
│   ├── TopologyError      workers that split the same matrices are on several nodes
│   └── NonFiniteLossError a loss or gradient is NaN or infinite
├── TuningError            a search cannot start or continue
│   └── ActorBusyError     a trial's actor cannot run another trial
├── PlanError              a cluster is unknown, or no parallel plan fits
├── CompileError           a model cannot be exported, or its numbers differ too much
├── EngineError            a compiled model cannot be loaded
│   └── ModelLoadError     a model cannot be loaded for the request that needs it
├── RequestError           a request to the endpoint is malformed
│   ├── RequestTooLargeError  it is larger than the server takes
│   ├── UnsupportedError   it asks for what the server does not do
│   └── DisconnectedError  its client went away
├── UnauthorizedError      a request does not show the endpoint's token
├── NotServedError         a request names a model that is not served
├── OverloadError          too many requests are waiting at the endpoint
├── DeadlineError          a request cannot be answered in time
└── DeliveryError          a receiver did not take a notification
    └── TryLaterError      it may take it later

Each message says what was given, what was expected and what to do. ``rule`` and ``key`` identify the error for
programs and tests. They stay the same when the message changes. An error of a class that stands for several faults
names its rule where it is created. All attributes survive pickling between Ray's processes.
"""

import re
from reprlib import Repr
from typing import Self

_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxstring, _SHORT.maxother = 2, 8, 80, 80


def short_repr(value: object) -> str:
    """Return the ``repr`` of a value that a client sent, shortened: it may be of any size."""
    return _SHORT.repr(value)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without the system's number, or its class if it has none."""
    said = re.sub(r"^\[Errno -?\d+\] ", "", str(error).strip())
    return next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)


class RayloomError(Exception):
    """A problem that the user can solve. It is shown without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        words = re.findall("[A-Z][a-z]+", type(self).__name__.removesuffix("Error"))
        self.rule = "_".join(words).lower()
        """The broken rule, such as ``columns.missing``; by default the name of the class, such as ``not_served``."""
        self.key: str | None = None
        """The recipe key, field, option or parameter concerned, if there is one."""

    def of(self, rule: str, key: str | None = None) -> Self:
        """Set the rule and the key, as in ``raise DataError("...").of("columns.missing", "data.columns")``."""
        self.rule, self.key = rule, key
        return self


class RecipeError(RayloomError, ValueError):
    """The recipe, an override or a name in it is wrong. The validators of its sections raise it, too."""


class DataError(RayloomError):
    """The data cannot be read, or contradicts the recipe."""


class BrokerUnreachableError(DataError):
    """The broker of a stream does not answer. It may come back."""


class StorageError(RayloomError):
    """A place in storage is missing, taken or damaged."""


class UnsharedStorageError(StorageError):
    """A node cannot see files that another node wrote to storage."""


class ClusterError(RayloomError):
    """The local cluster is not in the state that a command needs."""


class NoClusterError(ClusterError):
    """No local cluster is up, and no other one is named."""


class TrainingError(RayloomError):
    """Training cannot start or continue."""


class TopologyError(TrainingError):
    """Workers that split the same matrices are on several nodes, or would be."""


class NonFiniteLossError(TrainingError):
    """A loss or gradient is NaN or infinite."""


class TuningError(RayloomError):
    """A search cannot start or continue."""


class ActorBusyError(TuningError):
    """A trial's actor is still storing its last trial's state, or cannot free it. The next trial needs a new actor."""


class PlanError(RayloomError):
    """A cluster is unknown, or no parallel plan fits it."""


class CompileError(RayloomError):
    """A model cannot be exported, or its numbers differ too much from PyTorch's."""


class EngineError(RayloomError):
    """A compiled model cannot be loaded."""


class ModelLoadError(EngineError):
    """A model that is loaded on demand cannot be loaded. The message is for clients: it has nothing of the cause."""


class RequestError(RayloomError):
    """A request to the endpoint is malformed; answered with status 400."""


class RequestTooLargeError(RequestError):
    """A request to the endpoint is larger than the server takes; answered with status 413."""


class UnsupportedError(RequestError):
    """A request asks for what the endpoint does not do; over gRPC answered with the status UNIMPLEMENTED."""


class DisconnectedError(RequestError):
    """The client went away before its request was complete or answered."""


class UnauthorizedError(RayloomError):
    """A request to the endpoint does not show its token; answered with status 401."""


class NotServedError(RayloomError):
    """A request names a model or version that is not served; answered with status 404."""


class OverloadError(RayloomError):
    """Too many requests are waiting at the endpoint; answered with status 503."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds until the waiting requests should be answered; 1 if that is unknown."""


class DeadlineError(RayloomError):
    """A request cannot be answered in time; answered with status 504."""


class DeliveryError(RayloomError):
    """A receiver did not take a notification, and will not."""


class TryLaterError(DeliveryError):
    """A receiver did not take a notification, and may take it later."""
