"""From the recipe's plan to DeepSpeed's configuration."""

from typing import Any

from app.config import TrainConfig


def deepspeed_config(config: TrainConfig) -> dict[str, Any]:
    """DeepSpeed's configuration, with the defaults that moved lately written out.

    Source: https://www.deepspeed.ai/docs/config-json
    """
    return {
        "train_batch_size": config.global_batch_size,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.gradient_accumulation,
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization": {"stage": config.plan.zero_stage},
        "zero_allow_untested_optimizer": True,  # SGD: DeepSpeed lists only the Adam family as tested
        "bf16": {"enabled": config.precision == "bf16"},
        "steps_per_print": 2**31,  # progress is ours to print
    }
