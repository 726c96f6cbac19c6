"""What PyTorch computes in: its names of the precisions that recipes name, and TF32."""

import torch

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def allow_tf32(allowed: bool) -> None:
    """Say for this whole process whether NVIDIA GPUs multiply float32 with TF32's 10 bits of mantissa.

    Training allows it, in matrix products and convolutions alike: it is several times faster. Inference never does:
    answers are compared with gates of 1e-4, which TF32 would miss. PyTorch's default is neither: TF32 in convolutions,
    not in products.
    """
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_float32_matmul_precision("high" if allowed else "highest")
