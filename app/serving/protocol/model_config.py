"""How a model is configured, in Triton's words: the message ``inference.ModelConfig``, and its JSON.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_configuration.md
"""

from typing import Any

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc.model_config_pb2 import ModelConfig

from app.repository.manifest import Manifest
from app.repository.triton import description_of


def model_config(manifest: Manifest) -> ModelConfig:
    """The configuration of a version, whether Triton has a backend for its engine or not."""
    return text_format.Parse(description_of(manifest), ModelConfig())


def config_json(config: ModelConfig) -> dict[str, Any]:
    """What HTTP answers: every field that is not a message in itself, set or not, whole numbers as numbers."""
    fields: dict[str, Any] = MessageToDict(
        config,
        always_print_fields_with_no_presence=True,
        preserving_proto_field_name=True,
        unquote_int64_if_possible=True,
    )
    return fields
