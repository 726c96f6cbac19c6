"""What the training frameworks of published runs do, as far as plans differ by it."""

from app.planner.traffic import RAYLOOM, Stack

STACKS = {
    "rayloom": RAYLOOM,
    "megatron": Stack("megatron", "megatron", splits_activations=True, splits_gradients=True),
    "megatron-deepspeed": Stack("megatron-deepspeed", "megatron", splits_activations=True, keeps_gradient_sums=True),
    "megatron-core": Stack(
        "megatron-core",
        "megatron",
        splits_activations=True,
        splits_gradients=True,
        hides_model_parallel=True,
        # cuDNN's, which it calls, on H100 (arXiv:2407.08608, figure 5: heads of 128, 4k).
        attention_factor=609 / 368,
    ),
    "fsdp": Stack("fsdp", "fsdp", gradient_bytes=2),
    "fsdp-eager": Stack("fsdp-eager", "fsdp", gradient_bytes=4),
    "fsdp-compile": Stack("fsdp-compile", "fsdp", gradient_bytes=4, kernel_factor=0.5, moved_factor=0.5),
}
