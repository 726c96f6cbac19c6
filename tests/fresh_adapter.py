"""python -m tests.fresh_adapter FOLDER: print the checksum of a fresh adapter, of the first two builds of a process."""

import sys
from functools import partial
from hashlib import sha256

import torch
from torch import nn

from app.config import ModelConfig
from app.models.adapter import adapt
from app.models.blueprint import Blueprint
from app.models.factory import build_model
from app.models.pretrained import with_pretrained_weights


def fresh_adapter(folder: str) -> str:
    """Build a model that is recorded, and return a checksum of its fresh adapter."""
    torch.manual_seed(0)
    config = ModelConfig.model_validate({"pretrained": folder, "adapter": {"lora": {"rank": 4}}})
    blueprint = Blueprint.of(partial(adapted_decoder, config))
    assert {parameter.device.type for parameter in blueprint.model.parameters()} == {"meta"}
    state = with_pretrained_weights(blueprint, config).make().state_dict()
    return sha256(b"".join(state[name].numpy().tobytes() for name in state if ".lora_A." in name)).hexdigest()


def adapted_decoder(config: ModelConfig) -> nn.Module:
    assert config.adapter is not None
    return adapt(build_model(config, {}), config.adapter.lora, trains_head=False)


if __name__ == "__main__":
    print(fresh_adapter(sys.argv[1]), fresh_adapter(sys.argv[1]))
