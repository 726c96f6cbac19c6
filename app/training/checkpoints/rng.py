"""The random numbers of a process, as tensors."""

import random

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's, Python's and NumPy's generators; copies."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "torch": torch.get_rng_state().clone(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([0.0, 0.0] if gauss is None else [1.0, gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
    }
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Continue the sequences that ``random_state`` saw."""
    torch.set_rng_state(states["torch"])
    has_python_gauss, python_gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), python_gauss if has_python_gauss else None))
    position, has_gauss, cached = states["numpy_rest"].tolist()
    keys = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
