"""The recipe: one task from its data to its endpoint, as a frozen tree of pydantic models."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, PositiveInt, ValidationInfo, model_validator

from app.config.alerts import AlertConfig
from app.config.compile import CompileConfig
from app.config.data import DataConfig, ImageConfig
from app.config.notify import NotifyConfig
from app.config.plan import PlanConfig
from app.config.section import IMPORT_STRING, LOCATION, NAME, Fraction, Section, is_stored
from app.config.serve import ServeConfig
from app.config.tracking import TrackingConfig
from app.config.train import TrainConfig
from app.config.tune import TuneConfig
from app.errors import RecipeError
from app.import_string import import_attribute
from app.uris import PERCENT_ENCODE, holds_secret

ImportString = Annotated[str, Field(pattern=rf"^{IMPORT_STRING}$")]
BUILT_IN_TASKS = {
    "text-classification": "app.tasks.classification:TextClassification",
    "image-classification": "app.tasks.classification:ImageClassification",
    "tabular-classification": "app.tasks.classification:TabularClassification",
    "text-regression": "app.tasks.regression:TextRegression",
    "tabular-regression": "app.tasks.regression:TabularRegression",
    "text-multilabel": "app.tasks.multilabel:TextMultiLabel",
    "tabular-multilabel": "app.tasks.multilabel:TabularMultiLabel",
    "multimodal-classification": "app.tasks.multimodal:MultimodalClassification",
    "multimodal-regression": "app.tasks.multimodal:MultimodalRegression",
    "multimodal-multilabel": "app.tasks.multimodal:MultimodalMultiLabel",
    "sentence-embedding": "app.tasks.embedding:SentenceEmbedding",
    "token-classification": "app.tasks.tagging:TokenClassification",
    "language-modeling": "app.tasks.language:LanguageModeling",
    "chat": "app.tasks.language:Chat",
}
"""The import string of each task that a recipe may name in short."""
TENSORS = "tensors"
"""The task of an imported model without a processor: tensors in, tensors out. It is not trained here."""
_ENDLESS = "one reads all data, the other has no end"
_CONTRADICTIONS = {
    ("train.tokens_per_batch", "data.sampling"): "one reads every row once, the other repeats some",
    ("train.tokens_per_batch", "data.sources"): "one reads every row once, the other repeats some",
    ("train.tokens_per_batch", "train.curriculum"): "one puts rows of similar length together, the other easy rows",
    ("train.tokens_per_batch", "data.stream"): "micro-epochs are made of batches of samples",
    ("data.sampling", "data.sources"): "both say how often a row is read",
    ("train.curriculum", "data.stream"): "one knows how hard all rows are, the other has no end",
    ("train.teacher", "train.augment"): "a teacher gives its logits once for each sample, and augment changes samples",
    ("train.prune", "model.adapter"): "one trains the weights that it leaves, the other freezes them",
    ("data.test_fraction", "data.stream"): "each micro-epoch has shards of its own",
    ("data.test_source", "data.stream"): "each micro-epoch has shards of its own",
    **{(f"data.clean.{key}", "data.stream"): _ENDLESS for key in ("near_duplicates", "label_noise")},
    **{(key, "data.stream"): _ENDLESS for key in ("train.teacher", "train.linear_baseline", "tune")},
}
"""Keys that cannot both be set, and why."""
Name = Annotated[str, Field(pattern=rf"^{NAME}$")]
PublishedModel = Literal["teacher", "curriculum"]
"""The sections of ``train`` that may name a published model."""


def texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string of a tree with its dotted key, including the keys of its mappings."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, Mapping):
        for name, value in node.items():
            dotted = f"{key}.{name}" if key else str(name)
            yield key, str(name)
            yield from texts(value, dotted)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from texts(value, key)


class LoraConfig(Section):
    """A low-rank adapter (LoRA, arXiv:2106.09685)."""

    rank: PositiveInt = Field(default=8, description="inner width of each pair of matrices")
    alpha: Annotated[float, Field(gt=0.0)] = Field(default=16.0, description="the change is scaled by alpha / rank")
    targets: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None, description="last parts of the names of the matrices to adapt; default: all but the head"
    )
    dropout: Fraction = Field(default=0.0, description="dropout of the adapter's input")
    dora: bool = Field(
        default=False, description="also learn the norm of each row of a matrix (DoRA, arXiv:2402.09353)"
    )


class AdapterConfig(Section):
    """What is trained beside frozen weights."""

    lora: LoraConfig = LoraConfig()


class ModelConfig(Section):
    """The model: a function that returns a ``torch.nn.Module`` with its arguments, or the files of a trained model."""

    factory: ImportString | None = Field(
        default=None,
        description="import path, package.module:name, of a function that returns a torch.nn.Module; can be left "
        "out with pretrained",
    )
    pretrained: Annotated[str | None, LOCATION] = Field(
        default=None,
        description="model in Hugging Face's layout whose weights, and tokenizer or image processor, training starts "
        "from: a folder or URI, package:NAME/FOLDER in an installed package, or a hub name, also NAME@REVISION",
    )
    args: dict[str, Any] = Field(
        default={},
        description="arguments of the factory; it also gets the dataset properties that its signature names; without "
        "a factory, other values of the pretrained model's configuration",
    )
    adapter: AdapterConfig | None = Field(
        default=None, description="train an adapter beside the frozen weights of pretrained; default: train all weights"
    )
    configuration: dict[str, Any] | None = Field(
        default=None, description="configuration of the pretrained model; a run writes it into its own recipe"
    )
    weights_sha256: str | None = Field(
        default=None,
        description="sha256 of the pretrained model's safetensors file, or of the lines that sha256sum prints for "
        "several; a run writes it into its own recipe",
    )

    commit: str | None = Field(
        default=None,
        description="commit that the hub name resolved to when the run began; a run writes it into its own recipe",
    )

    @property
    def source(self) -> str | None:
        """``pretrained``, at the commit that a run has recorded."""
        if self.pretrained is None or self.commit is None:
            return self.pretrained
        return f"{self.pretrained.partition('@')[0]}@{self.commit}"

    @property
    def title(self) -> str:
        """The key that says which model it is, with its value."""
        return f"model.factory {self.factory!r}" if self.factory else f"model.pretrained {self.pretrained!r}"

    @property
    def origin(self) -> str | None:
        """The pretrained model, with the sha256 of its weights if a run has recorded it; None if there is none."""
        sha256 = f" sha256:{self.weights_sha256}" if self.weights_sha256 else ""
        return f"{self.source}{sha256}" if self.pretrained else None

    @property
    def as_given(self) -> "ModelConfig":
        """The section as a person writes it."""
        return self.model_copy(update={"configuration": None, "weights_sha256": None, "commit": None})

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.factory is None and self.pretrained is None:
            raise RecipeError(
                "factory is missing: name a function that returns a torch.nn.Module, package.module:name, or set "
                "pretrained to a model to start from"
            ).of("model.missing")
        if self.adapter and self.pretrained is None:
            raise RecipeError("adapter needs weights to adapt: set pretrained, or leave adapter out").of(
                "adapter.no_weights"
            )
        return self


class TunedFrom(Section):
    """The trial of a search that found a recipe's values."""

    run: str = Field(description="id of the tune run")
    trial: int = Field(description="number of the trial in that run")

    def __str__(self) -> str:
        return f"trial {self.trial} of {self.run}"


class Recipe(Section):
    """One task, its data and its model, from training to the endpoint."""

    name: Name = Field(description="name of the recipe, and of the model that it publishes")
    task: Annotated[str, Field(pattern=rf"^({'|'.join(BUILT_IN_TASKS)}|{TENSORS}|{IMPORT_STRING})$")] = Field(
        description=f"{', '.join(BUILT_IN_TASKS)}; or the import string of a task or a processor of your own"
    )
    storage: str | None = Field(
        default=None, description="URI or absolute path; default: $RAYLOOM_STORAGE, else ~/.rayloom/storage"
    )
    data: DataConfig
    model: ModelConfig
    train: TrainConfig = TrainConfig()
    tune: TuneConfig | None = Field(
        default=None, description="search that jobs.tune runs, and jobs.lifecycle before training; default: none"
    )
    compile: CompileConfig = CompileConfig()
    serve: ServeConfig = ServeConfig()
    alerts: list[AlertConfig] = Field(default=[], description="rules over the metrics that training reports")
    notify: NotifyConfig = NotifyConfig()
    tracking: TrackingConfig = TrackingConfig()
    tuned_from: TunedFrom | None = Field(
        default=None, description="trial of the search that found the values; written into best.yaml"
    )

    def value_of(self, key: str) -> Any:
        """Return the value of a dotted key, with indices of lists; None if its section is null."""
        value: Any = self
        for name in key.split("."):
            value = value and (value[int(name)] if name.isdecimal() else getattr(value, name))
        return value

    def is_set(self, key: str) -> bool:
        """Return whether a dotted key has another value than its default. A stored recipe holds every key.

        A switch that is off counts as unset if its default is the task's choice.
        """
        parent, _, name = key.rpartition(".")
        section = self.value_of(parent) if parent else self
        if section is None:
            return False
        value, default = getattr(section, name), type(section).model_fields[name].default
        return bool(value != default and (value, default) != (False, None))

    @property
    def differences(self) -> dict[str, Any]:
        """The values that differ from their defaults, by dotted keys."""
        return dict(_differences(self))

    def with_plan(self, plan: PlanConfig, **train: Any) -> "Recipe":
        """Return the recipe with this plan, and with other values of ``train``. They are not checked."""
        return self.model_copy(update={"train": self.train.model_copy(update={"plan": plan, **train})})

    def with_published(self, section: PublishedModel, model: str) -> "Recipe":
        """Return the recipe with another published model in a section of ``train``. It is not checked."""
        named = getattr(self.train, section).model_copy(update={"model": model})
        return self.model_copy(update={"train": self.train.model_copy(update={section: named})})

    @property
    def as_given(self) -> "Recipe":
        """The recipe without what a run writes into its section ``model``."""
        return self.with_model(self.model.as_given)

    def with_model(self, model: ModelConfig) -> "Recipe":
        """Return the recipe with another section ``model``. It is not checked."""
        return self.model_copy(update={"model": model})

    def as_found_by(self, earlier: "Recipe") -> "Recipe":
        """Return the recipe with what an earlier run resolved: its section ``model``, and versions of published models.

        Each is taken over only if both recipes name the same model.
        """
        recipe = self.with_model(earlier.model) if earlier.model.as_given == self.model.as_given else self
        for section in get_args(PublishedModel):
            given, found = self.value_of(f"train.{section}.model"), earlier.value_of(f"train.{section}.model")
            # A name without a version meant the version in production at that time.
            if given and found and found.startswith(f"{given}/"):
                recipe = recipe.with_published(section, found)
        return recipe

    @model_validator(mode="after")
    def _holds_no_secrets(self, info: ValidationInfo) -> Self:
        """Refuse a secret in any URI: a run writes its recipe into storage, logs and trackers."""
        if not is_stored(info) and (keys := [key for key, text in texts(self.model_dump()) if holds_secret(text)]):
            raise RecipeError(
                f"{keys[0]} is a URI with a password, a token or a signature, and a recipe must not contain secrets: "
                "where the key accepts it, give env:NAME or file:/PATH; else set the secret in the environment of the "
                f"cluster's nodes, in the variables that the protocol's driver reads. {PERCENT_ENCODE}"
            ).of("secret.in_recipe")
        return self

    @model_validator(mode="after")
    def _task_supports_keys(self, info: ValidationInfo) -> Self:
        """Have a built-in task refuse what it does not support. Jobs, which can import it, ask a person's own task."""
        if self.task in BUILT_IN_TASKS and not is_stored(info):
            import_attribute(BUILT_IN_TASKS[self.task])().require(self)
        return self

    @model_validator(mode="after")
    def _keys_are_consistent(self) -> Self:
        """Refuse keys that contradict each other. All others compose."""
        for (one, other), reason in _CONTRADICTIONS.items():
            if self.is_set(one) and self.is_set(other):
                raise RecipeError(f"{one} and {other} contradict each other: {reason}; leave one of them out").of(
                    "keys.contradict", one
                )
        return self

    @model_validator(mode="after")
    def _labels_are_balanced_once(self, info: ValidationInfo) -> Self:
        # A named run, which may have started before this rule, goes on.
        is_new = self.train.resume in (None, "latest") and not is_stored(info)
        if is_new and self.train.class_weights == self.data.sampling == "balanced":
            raise RecipeError(
                "train.class_weights and data.sampling are both balanced, which compensates for rare labels twice: "
                "leave one of them out, or give each label a weight"
            ).of("keys.contradict", "train.class_weights")
        return self

    @model_validator(mode="after")
    def _stream_has_no_end(self) -> Self:
        """Refuse what needs all labels of a stream, or the number of its steps."""
        stream, train = self.data.stream, self.train
        if stream is None:
            return self
        if train.class_weights == "balanced":
            raise RecipeError(
                "train.class_weights balanced counts all labels, and data.stream has no end: give each label a weight"
            ).of("stream.no_end")
        schedule = train.schedule
        if train.max_steps is None and (schedule.name != "constant" or schedule.warmup_fraction > 0.0):
            raise RecipeError(
                f"train.schedule is {schedule.name} with warmup_fraction {schedule.warmup_fraction:g}, and the number "
                "of steps of a stream is not known: set train.max_steps, or schedule: {name: constant, "
                "warmup_fraction: 0.0}"
            ).of("stream.no_end")
        if stream.samples < train.batch_size:
            raise RecipeError(
                f"data.stream.samples is {stream.samples}, fewer than the {train.batch_size} of "
                "train.global_batch_size: raise it, or lower the batch"
            ).of("batch.too_large")
        return self

    @model_validator(mode="after")
    def _pretrained_brings_its_processor(self) -> Self:
        if self.model.pretrained is not None and ":" not in self.task:
            shape = self.data.image.model_copy(update={"background": ImageConfig().background})
            for key, given in (("tokenizer", self.data.tokenizer), ("image", shape)):
                if given != DataConfig.model_fields[key].default:
                    raise RecipeError(f"data.{key} is what model.pretrained brings: leave one of them out").of(
                        "keys.contradict"
                    )
        return self


def _differences(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a section that differ from their defaults, by dotted keys."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _differences(value, f"{prefix}{name}.")
        elif value != field.get_default(call_default_factory=True):
            yield f"{prefix}{name}", value
