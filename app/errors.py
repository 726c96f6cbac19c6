"""Every error that Rayloom raises on purpose.

RayloomError
├── RecipeError            the recipe, an override or a name in it is wrong
├── DataError              the data cannot be read, or is not what the recipe says
├── StorageError           a place in storage is missing, taken or damaged
├── ClusterError           the local cluster is not in the state that a command needs
├── TrainingError          training cannot start or go on
│   └── NonFiniteLossError a loss or gradient is not a number, or infinite
├── TuningError            a search cannot start or go on
├── CompileError           a model cannot be exported, or its numbers differ too much
├── EngineError            a compiled model cannot be loaded
├── RequestError           a request to the endpoint is malformed
│   └── RequestTooLargeError  it is larger than the server takes
└── DeliveryError          a receiver did not take a notification
    └── TryLaterError      it may take it later

Each message says what was given, what was expected and what to do. Each error is built from one
string, so that it survives pickling between Ray's processes.
"""


class RayloomError(Exception):
    """A problem that the person at the keyboard can solve; shown without a traceback."""


class RecipeError(RayloomError):
    """The recipe, an override or a name in it is wrong."""


class DataError(RayloomError):
    """The data cannot be read, or is not what the recipe says."""


class StorageError(RayloomError):
    """A place in storage is missing, taken or damaged."""


class ClusterError(RayloomError):
    """The local cluster is not in the state that a command needs."""


class TrainingError(RayloomError):
    """Training cannot start or go on."""


class NonFiniteLossError(TrainingError):
    """A loss or gradient is not a number, or infinite."""


class TuningError(RayloomError):
    """A search cannot start or go on."""


class CompileError(RayloomError):
    """A model cannot be exported, or its numbers differ too much from PyTorch's."""


class EngineError(RayloomError):
    """A compiled model cannot be loaded."""


class RequestError(RayloomError):
    """A request to the endpoint is malformed; answered with status 400."""


class RequestTooLargeError(RequestError):
    """A request to the endpoint is larger than the server takes; answered with status 413."""


class DeliveryError(RayloomError):
    """A receiver did not take a notification, and will not."""


class TryLaterError(DeliveryError):
    """A receiver did not take a notification, and may take it later."""
