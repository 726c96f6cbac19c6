"""A model's configuration in Triton's format: the message ``inference.ModelConfig``, and its JSON.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_configuration.md
"""

from typing import Any

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc.model_config_pb2 import ModelConfig

from app.repository.manifest import Manifest
from app.repository.triton import description_of
from app.serving.batching.scheduler import BatchingPolicy


def model_config(manifest: Manifest, policy: BatchingPolicy) -> ModelConfig:
    """Return the configuration of a version with a batching policy, even if Triton has no backend for its engine."""
    config = text_format.Parse(description_of(manifest), ModelConfig())
    config.max_batch_size = policy.max_batch_size
    batching = config.dynamic_batching
    batching.preferred_batch_size[:] = policy.preferred_batch_sizes
    batching.max_queue_delay_microseconds = _microseconds(policy.max_queue_delay_s)
    batching.priority_levels = policy.priority_levels
    batching.default_priority_level = policy.default_priority
    # Late requests are refused, and a request may set a shorter timeout.
    queue = batching.default_queue_policy
    queue.max_queue_size = policy.queue_limit
    queue.allow_timeout_override = True
    queue.default_timeout_microseconds = _microseconds(policy.default_timeout_s or 0.0)
    return config


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the JSON for HTTP. Scalar fields are included even if unset, and integers are numbers."""
    fields: dict[str, Any] = MessageToDict(
        config,
        always_print_fields_with_no_presence=True,
        preserving_proto_field_name=True,
        unquote_int64_if_possible=True,
    )
    return fields


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
