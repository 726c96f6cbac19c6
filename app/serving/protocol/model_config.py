"""How a model is configured, in Triton's words: the message ``inference.ModelConfig``, and its JSON.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_configuration.md
"""

from typing import Any

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc.model_config_pb2 import ModelConfig

from app.repository.manifest import Manifest
from app.repository.triton import description_of
from app.serving.batching.policy import BatchingPolicy


def model_config(manifest: Manifest, policy: BatchingPolicy) -> ModelConfig:
    """The configuration of a version that is batched so, whether Triton has a backend for its engine or not."""
    config = text_format.Parse(description_of(manifest), ModelConfig())
    config.max_batch_size = policy.max_batch_size
    batching = config.dynamic_batching
    batching.preferred_batch_size[:] = policy.preferred_batch_sizes
    batching.max_queue_delay_microseconds = _microseconds(policy.max_queue_delay_s)
    batching.priority_levels = policy.priority_levels
    batching.default_priority_level = policy.default_priority
    queue = batching.default_queue_policy  # what is too late is refused, also if the request asks for less
    queue.max_queue_size = policy.queue_limit
    queue.allow_timeout_override = True
    queue.default_timeout_microseconds = _microseconds(policy.default_timeout_s or 0.0)
    return config


def config_json(config: ModelConfig) -> dict[str, Any]:
    """What HTTP answers: every field that is not a message in itself, set or not, whole numbers as numbers."""
    fields: dict[str, Any] = MessageToDict(
        config,
        always_print_fields_with_no_presence=True,
        preserving_proto_field_name=True,
        unquote_int64_if_possible=True,
    )
    return fields


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
