"""Models that start from the weights of a folder in Hugging Face's layout.

The tensors are read one at a time, when the plan makes them. So no process holds more of the model than its part.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from app.config import ModelConfig
from app.errors import RecipeError, first_line
from app.import_string import did_you_mean
from app.models.adapter import BASE, is_head, is_of_adapter, magnitude_readers
from app.models.blueprint import Blueprint
from app.models.traits import is_hugging_face
from app.pretrained import PretrainedFolder, open_pretrained
from app.storage import ProgressCallback, no_op

_NOT_KEPT = (
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "id2label", "label2id",
    "num_labels", "problem_type", "auto_map", "quantization_config",
)  # fmt: skip
"""Keys of ``config.json`` that the recipe or the data decide."""


def read_configuration(location: str) -> dict[str, Any]:
    """Return the configuration of a pretrained model, as ``ModelConfig.configuration`` keeps it.

    Raises:
        RecipeError: the folder has none, or transformers does not know the type of the model.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    folder = open_pretrained(location)
    kind = folder.config["model_type"]
    if kind not in CONFIG_MAPPING:
        raise RecipeError(
            f"{folder} is a {kind!r}, which transformers does not have: name a function that builds it, model.factory; "
            f"{did_you_mean(kind, list(CONFIG_MAPPING))}"
        ).of("model.type_unknown", "model.pretrained")
    if "quantization_config" in folder.config:
        raise RecipeError(
            f"{folder} has quantized weights, which cannot be trained: give the folder of the whole model"
        ).of("pretrained.quantized", "model.pretrained")
    try:
        given = AutoConfig.from_pretrained(folder.path, trust_remote_code=False).to_dict()
    except Exception as error:  # of many classes
        raise RecipeError(
            f"{folder}: config.json cannot be read by transformers ({first_line(error)}): correct it, or download the "
            "folder again"
        ).of("file.unreadable", "model.pretrained") from error
    return {name: value for name, value in given.items() if name not in _NOT_KEPT}


def build_configured(config: ModelConfig, facts: Mapping[str, int]) -> nn.Module:
    """Return the model that the configuration describes, with fresh weights: a classifier if the data have labels.

    Raises:
        RecipeError: ``model.args`` has an unknown key, or the data do not suit the model.
    """
    from transformers import AutoConfig

    assert config.pretrained is not None
    keys = dict(config.configuration or read_configuration(str(config.source)))
    for name in config.args:
        if name not in keys:
            raise RecipeError(
                f"unknown key model.args.{name} of a {keys['model_type']}; {did_you_mean(name, list(keys))}"
            ).of("recipe.extra_forbidden", "model.args")
    # Training needs no cache, and with one transformers does not keep packed conversations apart.
    keys |= {"use_cache": False, **config.args}
    auto, given = _class_for(facts)
    keys |= given
    _require_suits(config.pretrained, keys, facts)
    try:
        model: nn.Module = auto.from_config(AutoConfig.for_model(**keys))
    except Exception as error:  # of many classes
        task = auto.__name__.removeprefix("AutoModelFor")
        raise RecipeError(
            f"model.pretrained {config.pretrained!r} is a {keys['model_type']}, of which transformers makes no {task}: "
            f"{first_line(error)}"
        ).of("pretrained.no_such_head", "model.pretrained") from error
    if "dimensions" in facts:
        from app.models.embedding import mean_pooled

        return mean_pooled(model)
    return model


def _class_for(facts: Mapping[str, int]) -> tuple[Any, dict[str, Any]]:
    """Return the class of transformers for data with these facts, and keys of the configuration that follow."""
    import transformers

    if "dimensions" in facts:
        return transformers.AutoModel, {}
    if "num_labels" not in facts:
        return transformers.AutoModelForCausalLM, {"pad_token_id": None}  # blocks are not padded
    keys = {"num_labels": facts["num_labels"]}
    if "channels" in facts:
        return transformers.AutoModelForImageClassification, keys
    keys["pad_token_id"] = facts.get("pad_id", 0)  # a decoder finds the last token by it
    kind = "Token" if "per_token" in facts else "Sequence"
    return getattr(transformers, f"AutoModelFor{kind}Classification"), keys


def _require_suits(location: str, keys: Mapping[str, Any], facts: Mapping[str, int]) -> None:
    """Raise RecipeError if the tokenizer has more tokens than the model, or images have another size."""
    vocabulary, given = keys.get("vocab_size"), facts.get("vocab_size")
    if isinstance(vocabulary, int) and given is not None and given > vocabulary:
        raise RecipeError(
            f"model.pretrained {location!r}: the tokenizer has {given:,} tokens, the model {vocabulary:,}: the files "
            "are of different models"
        ).of("pretrained.mixed", "model.pretrained")
    for key, fact in (("image_size", "image_size"), ("num_channels", "channels")):
        expected = keys.get(key)
        if isinstance(expected, int) and facts.get(fact, expected) != expected:
            raise RecipeError(
                f"model.pretrained {location!r}: images have {fact} {facts[fact]}, the model takes {key} {expected}"
            ).of("pretrained.other_images", "model.pretrained")


def described(config: ModelConfig) -> ModelConfig:
    """Return the section with what its folder holds: the configuration, the weights' checksum and the hub's commit.

    Raises:
        RecipeError: the weights are not those that the section was described with, or as ``read_configuration``.
    """
    assert config.source is not None
    folder = open_pretrained(config.source)
    configuration = None if config.factory else read_configuration(config.source)
    sha256 = folder.weights_sha256(config.weights_sha256)
    return config.model_copy(update={"configuration": configuration, "weights_sha256": sha256, "commit": folder.commit})


@dataclass(frozen=True)
class WeightMatch:
    """Where each tensor of a model comes from."""

    sources: Mapping[str, tuple[Path, str]]
    """The file and the name in it, by the name in the model."""
    fresh: list[str]
    """Tensors of the model that are made anew."""
    unused: list[str]
    """Tensors of the folder that the model does not have."""

    def __str__(self) -> str:
        parts = [f"{len(self.sources)} tensors read"]
        parts += [f"made anew: {', '.join(self.fresh)}"] if self.fresh else []
        parts += [f"not used: {_shortened(self.unused)}"] if self.unused else []
        return "; ".join(parts)


def with_pretrained_weights(
    blueprint: Blueprint, config: ModelConfig, on_progress: ProgressCallback = no_op
) -> Blueprint:
    """Return the blueprint with readers of the folder's tensors.

    Raises:
        RecipeError: this machine's folder has other weights than ``config`` records, or as ``match_weights``.
    """
    assert config.source is not None
    if config.weights_sha256:
        open_pretrained(config.source).weights_sha256(config.weights_sha256, on_progress)
    match = match_weights(blueprint.model, config.source)
    readers: dict[str, Callable[[], Tensor]] = {name: partial(_read, *source) for name, source in match.sources.items()}
    return blueprint.with_values(readers | magnitude_readers(blueprint.model, readers))


def match_weights(model: nn.Module, location: str) -> WeightMatch:
    """Find the folder's tensor for each tensor of the model.

    What lies outside the base model (``base_model_prefix`` of transformers), and its pooler, is a head. A head that is
    missing or has another shape is made anew. Everything else must be there.

    Raises:
        RecipeError: the weights are of another model: a tensor is missing or has another shape. It is named.
    """
    folder = open_pretrained(location)
    # keep_vars keeps the identity of tensors, by which tied ones are known.
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    # The folder has the names of the model without an adapter.
    plain = {name.replace(BASE, "."): name for name in state if not is_of_adapter(name)}
    rename = _renaming(model, {name: state[given] for name, given in plain.items()}, folder)
    sources: dict[str, tuple[Path, str]] = {}
    unused: list[str] = []
    wrong: dict[str, str] = {}
    for file in folder.weights_files:
        for given, shape in _shapes(file, folder).items():
            name = plain.get(rename(given))
            if name is None:
                unused.append(given)
            elif shape == list(state[name].shape):
                sources[name] = file, given
            else:
                wrong[name] = f"{given} has shape {shape}, the model {list(state[name].shape)}"
    read = {id(state[name]) for name in sources}  # a tied tensor may have any of its names
    fresh = [name for name in plain.values() if id(state[name]) not in read]
    if not sources:
        raise RecipeError(f"{folder} has no tensor of a {type(model).__name__}: its weights are of another model").of(
            "pretrained.other_weights", "model.pretrained"
        )
    if broken := [name for name in fresh if not is_head(name, model)]:
        reason = wrong.get(broken[0], f"there is no {broken[0]}")
        raise RecipeError(
            f"{folder} is not a whole {type(model).__name__}: {reason} ({len(broken)} such tensors): give the folder "
            "of this model, or leave out the keys of model.args that change its size"
        ).of("pretrained.other_weights", "model.pretrained")
    return WeightMatch(sources, fresh, unused)


def _renaming(model: nn.Module, state: Mapping[str, Tensor], folder: PretrainedFolder) -> Callable[[str], str]:
    """Return a function from a name in the files to one in the model, by the rules of transformers."""
    if not is_hugging_face(model):
        return lambda name: name
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules: Any = get_model_conversion_mapping(model)  # type: ignore[no-untyped-call, unused-ignore]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def rename(name: str) -> str:
        renamed, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if converted is not None:
            raise RecipeError(
                f"{folder}: transformers joins {name} with other tensors when it reads a {type(model).__name__}, which "
                "Rayloom cannot: give another model"
            ).of("pretrained.joined_tensors", "model.pretrained")
        return str(renamed)

    return rename


def _shapes(file: Path, folder: PretrainedFolder) -> dict[str, list[int]]:
    """Return the shapes of a file's tensors by name. Only its header is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            return {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise RecipeError(f"{folder}: {file.name} cannot be read ({error}): download the folder again").of(
            "file.unreadable", "model.pretrained"
        ) from error


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        tensor: Tensor = opened.get_tensor(name).clone()  # the file's pages are released
        return tensor


def _shortened(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"
