"""Low-rank adapters: LoRA (Hu et al. 2021, arXiv:2106.09685) and DoRA (Liu et al. 2024, arXiv:2402.09353), by PEFT.

The model keeps its class and its forward pass. PEFT replaces the matrices that are adapted, in place. ``base_layer`` in
their names tells the frozen weight.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from app.config import LoraConfig, ModelConfig
from app.errors import RecipeError
from app.models.safetensors_file import Form, write_safetensors

BASE, _NAME = ".base_layer.", "default"
ADAPTER_FILE = "adapter_model.safetensors"
"""The weights in an adapter's folder, as ``PeftModel.from_pretrained`` reads it."""
_A, _B, _MAGNITUDE = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight", f".lora_magnitude_vector.{_NAME}.weight"


def adapt(model: nn.Module, config: LoraConfig, trains_head: bool) -> nn.Module:
    """Add the adapter to the model, and freeze everything else but a classifier's head. Return the model.

    Raises:
        RecipeError: a target matches no matrix. The names that exist are listed.
    """
    from peft import inject_adapter_in_model

    targets = _find_targets(model, config)
    adapted: nn.Module = inject_adapter_in_model(_peft_config(config, targets, model), model, adapter_name=_NAME)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad = is_of_adapter(name) or (trains_head and is_head(name, model))
    return adapted


def is_of_adapter(name: str) -> bool:
    """Return whether a tensor belongs to an adapter, by its name in the model."""
    return name.endswith((_A, _B, _MAGNITUDE))


def is_head(name: str, model: nn.Module) -> bool:
    """Return whether a tensor lies outside the base model of transformers (``base_model_prefix``), or in its pooler.

    In a model without a base model it is what is in no numbered layer.
    """
    prefix = str(getattr(model, "base_model_prefix", ""))
    if not prefix:
        return not any(part.isdigit() for part in name.split("."))
    if not hasattr(model, prefix):  # it is a base model itself
        return name.startswith("pooler.")
    inside = name.removeprefix(f"{prefix}.")
    return inside == name or inside.startswith("pooler.")


def _matrices(model: nn.Module) -> list[str]:
    """Return the names of all matrices that can be adapted."""
    kinds = ("Linear", "Conv1D")  # Conv1D: GPT-2's transposed matrix
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in kinds and not is_head(f"{name}.weight", model)
    ]


def _find_targets(model: nn.Module, config: LoraConfig) -> list[str]:
    """Return the full names of the matrices that ``config.targets`` names, by their last parts."""
    known = _matrices(model)
    if config.targets is None:
        return known
    found: list[str] = []
    for target in config.targets:
        matched = [name for name in known if name == target or name.endswith(f".{target}")]
        if not matched:
            names = list(dict.fromkeys(name.rpartition(".")[2] for name in known))
            raise RecipeError(
                f"model.adapter.lora.targets has {target!r}, which is no matrix of a {type(model).__name__}; "
                f"expected some of {', '.join(names)}"
            ).of("adapter.targets", "model.adapter.lora.targets")
        found += [name for name in matched if name not in found]
    return found


def _peft_config(config: LoraConfig, targets: list[str], model: nn.Module) -> Any:
    from peft import LoraConfig as PeftLoraConfig

    is_transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())
    return PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_dora=config.dora,
        target_modules=targets,
        fan_in_fan_out=is_transposed,
    )


def magnitude_readers(model: nn.Module, readers: Mapping[str, Callable[[], Tensor]]) -> dict[str, Callable[[], Tensor]]:
    """Return readers of DoRA's magnitudes: the norms of the rows of the weights that are read, not of fresh ones."""

    def norms(read: Callable[[], Tensor], is_transposed: bool) -> Callable[[], Tensor]:
        return lambda: torch.linalg.norm((read().T if is_transposed else read()).float(), dim=1)

    found = {}
    for name, _ in model.named_parameters():
        if name.endswith(_MAGNITUDE):
            layer = name.removesuffix(_MAGNITUDE)
            is_transposed = type(model.get_submodule(f"{layer}.base_layer")).__name__ == "Conv1D"
            found[name] = norms(readers[f"{layer}{BASE}weight"], is_transposed)
    return found


@dataclass(frozen=True)
class TrainedAdapter:
    """The tensors of a trained model with an adapter, read one at a time."""

    config: LoraConfig
    model: nn.Module
    """The adapted model, of which only names and classes are used."""
    forms: Mapping[str, Form]
    read: Callable[[str], Tensor]

    @classmethod
    @contextmanager
    def of(cls, file: Path, config: LoraConfig, model: nn.Module) -> "Iterator[TrainedAdapter]":
        """Open the float32 weights of an adapted model."""
        with safe_open(file, "pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            state = model.state_dict(keep_vars=True)
            forms = {name: Form(state[name].dtype, shape) for name, shape in shapes.items()}
            yield cls(config, model, forms, opened.get_tensor)

    def write_merged(self, file: Path) -> None:
        """Write the weights of a model without the adapter that gives the same answers."""
        names = {name.replace(BASE, "."): name for name in self.forms if not is_of_adapter(name)}
        write_safetensors(
            file, {plain: self.forms[name] for plain, name in names.items()}, lambda plain: self._merged(names[plain])
        )

    def _merged(self, name: str) -> Tensor:
        weight, layer = self.read(name), name.rpartition(BASE)[0]
        if not name.endswith(f"{BASE}weight"):
            return weight
        is_transposed = type(self.model.get_submodule(f"{layer}.base_layer")).__name__ == "Conv1D"
        change = self.config.alpha / self.config.rank * (self.read(f"{layer}{_B}") @ self.read(f"{layer}{_A}"))
        merged = (weight.T if is_transposed else weight) + change
        if self.config.dora:
            norm = torch.linalg.norm(merged, dim=1, keepdim=True)
            merged = merged * self.read(f"{layer}{_MAGNITUDE}").unsqueeze(1) / norm
        return (merged.T if is_transposed else merged).contiguous()

    def write_apart(self, folder: Path, model: ModelConfig) -> None:
        """Write the adapter, and a head that was trained with it, in PEFT's layout."""
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        names = {f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": name for name in self.forms if name in trained}
        names = {given.replace(f"_vector.{_NAME}", "_vector"): name for given, name in names.items()}
        write_safetensors(
            folder / ADAPTER_FILE,
            {given: self.forms[name] for given, name in names.items()},
            lambda given: self.read(names[given]),
        )
        config = _peft_config(self.config, [], self.model)
        config.target_modules = {name for name, module in self.model.named_modules() if hasattr(module, "base_layer")}
        heads = {name.rpartition(".")[0] for name in trained if not is_of_adapter(name)}
        config.modules_to_save = sorted({_module_of(head) for head in heads}) or None
        config.base_model_name_or_path, config.revision = model.pretrained, model.commit
        config.inference_mode = True
        config.save_pretrained(str(folder))


def _module_of(head: str) -> str:
    """Return the module that PEFT saves whole: the outermost one of a head, or the pooler of a base model."""
    parts = head.split(".")
    return "pooler" if "pooler" in parts else parts[0]
