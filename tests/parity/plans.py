"""The table of plans that must train the same model."""

from dataclasses import dataclass
from typing import Any

from app.config import ModelConfig, TrainConfig

STEPS, BATCH, LENGTH = 10, 16, 16
HALF = STEPS // 2
CLIPPING = 0.5  # smaller than any gradient here, so every step is clipped
FACTS = {"vocab_size": 257, "max_length": LENGTH}
MODELS = {
    "gpt": ModelConfig(factory="app.models.gpt:gpt", args={"layers": 4, "width": 32, "heads": 4}),
    "short gpt": ModelConfig(factory="app.models.gpt:gpt", args={"layers": 1, "width": 32, "heads": 4}),
    "no layers": ModelConfig(factory="app.models.gpt:gpt", args={"layers": 0, "width": 32, "heads": 4}),
    "untied gpt": ModelConfig(
        factory="app.models.gpt:gpt",
        args={"layers": 4, "width": 32, "heads": 4, "positions": "learned", "tied": False},
    ),
    "llama": ModelConfig(
        factory="app.models.huggingface:causal_lm",
        args={
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 64,
        },
    ),
}
MODELS["pretrained llama"] = ModelConfig(
    factory="app.models.huggingface:causal_lm", args=MODELS["llama"].args | {"initializer_range": 0.5}
)
"""Its weights come from a folder, which the ranks read. Fresh ones would give other losses."""
_ADAPTED = {"pretrained": "-", "factory": MODELS["llama"].factory, "args": MODELS["pretrained llama"].args}
MODELS["LoRA"] = ModelConfig.model_validate(_ADAPTED | {"adapter": {"lora": {"rank": 4, "alpha": 32.0}}})
MODELS["DoRA"] = ModelConfig.model_validate(_ADAPTED | {"adapter": {"lora": {"rank": 4, "alpha": 32.0, "dora": True}}})
PRETRAINED = ("pretrained llama", "LoRA", "DoRA")
"""Models that start from a folder. They are trained with AdamW alone."""
OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": 1.0, "momentum": 0.9},
    "adamw": {"name": "adamw", "lr": 1.0e-2},
}


@dataclass(frozen=True)
class Row:
    """A plan with an optimizer."""

    name: str
    model: str
    config: TrainConfig

    @property
    def tolerance(self) -> float:
        """Largest relative difference of a loss from plain PyTorch's."""
        plan = self.config.plan
        exact = self.config.precision == "fp32" and not (plan.communication_data_type or plan.powersgd)
        return 1e-4 if exact else 2e-2

    @property
    def slug(self) -> str:
        """The name as a folder."""
        return self.name.replace(" ", "_").replace(",", "")


# Pipelines come last: DeepSpeed remembers their grid for the rest of the process.
PLANS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one process": {"zero_stage": 0},
        "one process, accumulation 4": {"zero_stage": 1, "micro_batch": 4},
    },
    2: {
        **{f"ZeRO {stage}": {"zero_stage": stage} for stage in range(4)},
        **{f"ZeRO {stage}, accumulation 4": {"zero_stage": stage, "micro_batch": 2} for stage in range(4)},
        **{f"ZeRO {stage}, bf16": {"zero_stage": stage, "precision": "bf16"} for stage in range(4)},
        "ZeRO 1, bf16, accumulation 4": {"precision": "bf16", "micro_batch": 2},
        "ZeRO 1, gradients travel as bf16": {"communication_data_type": "bf16"},
        "ZeRO 0, PowerSGD": {"zero_stage": 0, "powersgd": {"rank": 8}},
        "ZeRO 1, recomputed activations": {"activation_checkpointing": True},
        **{
            f"ZeRO {stage}, torch.compile": {"zero_stage": stage, "torch_compile": True, "model": "short gpt"}
            for stage in (2, 3)
        },  # layers compile slowly
        **{
            f"ZeRO {stage}, torch.compile, no layers": {
                "zero_stage": stage,
                "torch_compile": True,
                "model": "no layers",
            }
            for stage in (2, 3)
        },
        "ZeRO 1, offload": {"offload": "cpu"},
        "ZeRO 2, offload": {"zero_stage": 2, "offload": "cpu"},
        "ZeRO 3, offload": {"zero_stage": 3, "offload": "cpu", "offload_param": "cpu"},
        **{f"pretrained, ZeRO {stage}": {"zero_stage": stage, "model": "pretrained llama"} for stage in (1, 3)},
        "pretrained, ZeRO 3, bf16": {"zero_stage": 3, "precision": "bf16", "model": "pretrained llama"},
        **{f"LoRA, ZeRO {stage}": {"zero_stage": stage, "model": "LoRA"} for stage in range(4)},
        **{
            f"LoRA, ZeRO {stage}, bf16": {"zero_stage": stage, "precision": "bf16", "model": "LoRA"} for stage in (1, 3)
        },
        **{f"DoRA, ZeRO {stage}": {"zero_stage": stage, "model": "DoRA"} for stage in range(4)},
        "Llama, tensor 2, ZeRO 0": {"tensor": 2, "zero_stage": 0, "model": "llama"},
        "Llama, tensor 2, ZeRO 1": {"tensor": 2, "model": "llama"},
        "Llama, pipeline 2": {"pipeline": 2, "micro_batch": 4, "model": "llama"},
        "Llama, pipeline 2, bf16": {"pipeline": 2, "micro_batch": 4, "precision": "bf16", "model": "llama"},
        "pretrained, tensor 2": {"tensor": 2, "model": "pretrained llama"},
        "pretrained, pipeline 2": {"pipeline": 2, "micro_batch": 4, "model": "pretrained llama"},
        "tensor 2": {"tensor": 2},
        "tensor 2, recomputed activations": {"tensor": 2, "activation_checkpointing": True},
        "tensor 2, bf16": {"tensor": 2, "precision": "bf16"},
        "pipeline 2": {"pipeline": 2},
        "pipeline 2, accumulation 4": {"pipeline": 2, "micro_batch": 4},
        "pipeline 2, recomputed activations": {"pipeline": 2, "micro_batch": 4, "activation_checkpointing": True},
        "pipeline 2, learned positions, untied": {"pipeline": 2, "model": "untied gpt"},
        "pipeline 2, bf16": {"pipeline": 2, "micro_batch": 4, "precision": "bf16"},
    },
    4: {
        "tensor 2 x data 2": {"tensor": 2},
        "pipeline 2 x data 2, accumulation 2": {"pipeline": 2, "micro_batch": 4},
        "pipeline 2 x tensor 2": {"pipeline": 2, "tensor": 2},
        "pipeline 2 x tensor 2, bf16": {"pipeline": 2, "tensor": 2, "micro_batch": 4, "precision": "bf16"},
        "Llama, pipeline 2 x tensor 2": {"pipeline": 2, "tensor": 2, "model": "llama"},
    },
    8: {
        "pipeline 2 x tensor 2 x data 2": {"pipeline": 2, "tensor": 2},
        "pipeline 2 x tensor 2 x data 2, accumulation 4": {"pipeline": 2, "tensor": 2, "micro_batch": 2},
        "pipeline 2 x tensor 2 x data 2, bf16": {"pipeline": 2, "tensor": 2, "micro_batch": 2, "precision": "bf16"},
    },
}
KEPT = (
    "ZeRO 0, sgd", "ZeRO 3, sgd", "pipeline 2, sgd", "ZeRO 1, adamw", "ZeRO 3, adamw", "ZeRO 1, bf16, adamw",
    "ZeRO 2, offload, adamw", "ZeRO 3, offload, adamw", "tensor 2, adamw", "pipeline 2, adamw",
    "pipeline 2 x tensor 2, adamw", "pipeline 2 x tensor 2 x data 2, adamw",
)  # fmt: skip
"""Plans whose state after half of the steps is resumed under other plans."""
GOES_ON = {
    1: ["one process, sgd", "one process, adamw"],
    2: ["ZeRO 1, sgd", "ZeRO 1, adamw", "ZeRO 3, adamw", "ZeRO 2, offload, adamw", "ZeRO 3, offload, adamw",
        "tensor 2, adamw", "pipeline 2, adamw"],
}  # fmt: skip
"""The plans that go on from every state, by the number of processes."""


def rows_of(workers: int) -> dict[str, Row]:
    """Every plan for so many processes with every optimizer that it takes, by name."""
    return {
        f"{name}, {optimizer}": _row(f"{name}, {optimizer}", workers, optimizer, **keys)
        for name, keys in PLANS[workers].items()
        for optimizer in OPTIMIZERS
        if optimizer == "adamw" or ("offload" not in keys and keys.get("model") not in PRETRAINED)
    }


@dataclass(frozen=True)
class Selection:
    """Names of rows in the table, by the number of processes."""

    compared: dict[int, list[str]]
    """Rows that are compared with plain PyTorch."""
    goes_on: dict[int, list[str]]
    """Rows that resume from the state of every kept row."""

    @property
    def kept(self) -> list[str]:
        """Compared rows whose state after half of the steps is kept for other plans to resume."""
        return [name for names in self.compared.values() for name in names if name in KEPT]


def _row(
    name: str,
    workers: int,
    optimizer: str,
    model: str = "gpt",
    precision: str = "fp32",
    torch_compile: bool = False,
    **plan: object,
) -> Row:
    config = {
        "global_batch_size": BATCH,
        "workers": workers,
        "precision": precision,
        "optimizer": OPTIMIZERS[optimizer],
        "gradient_clipping": CLIPPING,
        "torch_compile": torch_compile,
        "plan": plan,
        # Parameters as small as these would else stay whole under ZeRO 3.
        "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    }
    return Row(name, model, TrainConfig.model_validate(config))


SELECTIONS = {
    "whole": Selection({processes: list(rows_of(processes)) for processes in PLANS}, GOES_ON),
    "covering": Selection(
        compared={
            1: ["one process, sgd", "one process, accumulation 4, adamw"],
            2: [
                *("ZeRO 0, sgd", "ZeRO 0, bf16, sgd", "ZeRO 0, accumulation 4, adamw", "ZeRO 0, PowerSGD, adamw"),
                *("ZeRO 1, adamw", "ZeRO 1, bf16, accumulation 4, sgd", "ZeRO 1, gradients travel as bf16, sgd"),
                *("ZeRO 1, recomputed activations, sgd", "ZeRO 2, bf16, adamw", "ZeRO 2, accumulation 4, sgd"),
                *("ZeRO 2, torch.compile, no layers, adamw", "ZeRO 3, adamw", "ZeRO 3, bf16, sgd"),
                *("ZeRO 3, accumulation 4, adamw", "LoRA, ZeRO 1, bf16, adamw"),
                *("DoRA, ZeRO 3, adamw", "Llama, tensor 2, ZeRO 0, sgd", "pretrained, tensor 2, adamw"),
                *("pretrained, pipeline 2, adamw", "tensor 2, adamw", "tensor 2, bf16, sgd"),
                *("tensor 2, recomputed activations, adamw", "pipeline 2, adamw", "pipeline 2, bf16, sgd"),
                *("pipeline 2, recomputed activations, adamw", "pipeline 2, learned positions, untied, sgd"),
            ],
            4: [
                *("tensor 2 x data 2, sgd", "pipeline 2 x data 2, accumulation 2, adamw"),
                *("pipeline 2 x tensor 2, adamw", "pipeline 2 x tensor 2, bf16, sgd"),
            ],
        },
        goes_on={
            1: ["one process, sgd", "one process, adamw"],
            2: ["ZeRO 3, adamw", "tensor 2, adamw", "pipeline 2, adamw"],
        },
    ),
}
"""The covering array has each optimizer, precision and accumulation, and each pair of these, for every way to
distribute a model. It has every other key once, but for offload: DeepSpeed would compile its Adam first."""
