"""The manifest of a version: its contents, its lineage, and its defaults for serving."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal, Self

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from app.artifacts import WEIGHTS_FILE
from app.config import CalibrationMethod, ComputePrecision, EngineName, ServeConfig
from app.engines.architecture import Device
from app.engines.base import ShapeProfile, Signature
from app.engines.generation.base import PromptLookup
from app.engines.registry import runs_module, runs_plans
from app.errors import RecipeError
from app.repository.score import Scored
from app.storage import PlainName
from app.tensors import OUTPUT, Tensor

MODEL_FILE, PLAN_FILE = "model.onnx", "model.plan"
SHARD_PREFIX = f"{MODEL_FILE}."
"""Begins the names of the files with the weights of a large ONNX file."""

GENERATION_FILE = "openvino_model.xml"
"""The graph of a language model for OpenVINO. Its weights are in a file beside it."""

GENERATION_FILES: dict[EngineName, str] = {"openvino_genai": GENERATION_FILE, "vllm": WEIGHTS_FILE}
"""The file that identifies a language model, by its engine. The engine opens the folder."""

Split = Literal["test", "validation", "samples"]
"""The rows on which a score was measured. ``samples`` are those that a person gave for an imported model."""


class Quantization(BaseModel):
    """The quantization of a model to int8 or fp8."""

    method: CalibrationMethod
    smoothing: float
    """The degree to which outliers of activations were moved into weights, from 0 (none) to 1."""

    exempt: tuple[str, ...]
    """Nodes that stayed in float."""

    weights_only: bool = False
    """Whether the weights of exempt nodes are in int8 all the same, so that only their inputs are float."""

    finetuned: bool = False
    """Whether the weights were trained with the rounding of int8."""

    def __str__(self) -> str:
        but = " but for weights" if self.weights_only else ""
        trained = ", fine-tuned" if self.finetuned else ""
        return f"{self.method}, smoothing {self.smoothing:g}, {len(self.exempt)} nodes in float{but}{trained}"


class EngineKey(BaseModel):
    """The source of a compiled model, and its target machine."""

    onnx_sha256: str
    """The sha256 of the ONNX file; for the engine torch, of the weights; for a language model, of its file in
    ``GENERATION_FILES``."""

    precision: ComputePrecision
    engine: EngineName
    engine_version: str
    device: Device
    architecture: str
    """The result of ``app.engines.architecture.architecture_of``."""

    profile: ShapeProfile

    @property
    def file(self) -> str:
        """The file of the version that the engine opens."""
        if runs_plans(self.engine):
            return PLAN_FILE
        if self.engine in GENERATION_FILES:
            return GENERATION_FILES[self.engine]
        return WEIGHTS_FILE if runs_module(self.engine) else MODEL_FILE

    def __str__(self) -> str:
        return f"{self.engine} {self.engine_version}, {self.precision}, on {self.device} {self.architecture}"


class ImportedFrom(BaseModel):
    """The files of a model that was trained elsewhere."""

    kind: Literal["onnx", "torch.export", "triton", "hugging-face"]
    source: str
    """The path or URI that was given."""

    files: dict[str, str]
    """The sha256 of each file that was read, by its path in the source."""

    samples: str | None = None
    """The rows that were given; None if they were random."""

    def __str__(self) -> str:
        return f"{self.source} ({self.kind})"


class Lineage(BaseModel):
    """The origin of a version: a training run, or files of a model that was trained elsewhere."""

    train_run: str | None = None
    imported: ImportedFrom | None = None
    trial: str | None = None
    """The trial of a search whose values the training used, if any."""

    teacher: str | None = None
    """The model that training distilled, as NAME/VERSION, if any."""

    pretrained: str | None = None
    """The model whose weights training started from, with their sha256, if any."""

    compile_run: str
    recipe: str
    data_fingerprint: str
    code: str

    @property
    def baseline(self) -> str:
        """What gave the right answers when the version was compiled."""
        return "ONNX Runtime" if self.imported and self.imported.kind in ("onnx", "triton") else "PyTorch"


class ServingDefaults(BaseModel):
    """The measured settings for serving a version. A recipe can override them."""

    max_batch_size: PositiveInt
    max_batch_size_by_length: dict[PositiveInt, PositiveInt] = {}
    """The maximum at each measured length. Empty if inputs have one length, or in versions without this record."""

    preferred_batch_sizes: tuple[PositiveInt, ...] = ()
    timeout_us: NonNegativeInt
    """Microseconds that the first request of a batch waits for more."""

    replicas: PositiveInt
    threads: PositiveInt
    """Threads of one replica's engine."""

    @model_validator(mode="after")
    def _no_size_is_beyond_the_largest(self) -> Self:
        if max(self.preferred_batch_sizes, default=0) > self.max_batch_size:
            raise ValueError(
                f"preferred_batch_sizes are {list(self.preferred_batch_sizes)}: expected {self.max_batch_size} at "
                "most, which is max_batch_size"
            )
        if max(self.max_batch_size_by_length.values(), default=0) > self.max_batch_size:
            raise ValueError(
                f"max_batch_size_by_length is {self.max_batch_size_by_length}: expected {self.max_batch_size} at "
                "most, which is max_batch_size"
            )
        return self

    def within(self, cores: Sequence[int]) -> "ServingDefaults":
        """Return these settings, reduced so that no node has more threads than cores.

        Args:
            cores: the cores of each node that may hold replicas, which Serve spreads evenly. Empty if not known.
        """
        if not cores:
            return self
        threads = min(self.threads, min(cores))
        replicas = min(self.replicas, len(cores) * (min(cores) // threads))
        return self.model_copy(update={"threads": threads, "replicas": replicas})

    def overridden(self, config: ServeConfig) -> "ServingDefaults":
        """Return these settings with those of a recipe in their place. For a range of replicas, take the maximum.

        ``max_batch_size`` and preferred sizes of a recipe apply to rows of every length. Another number of replicas
        shares the cores that were measured, unless the recipe sets ``threads``. Compile does not measure sharded
        models: they have one replica, and each process has the threads that it reserves.
        """
        batching, sharded = config.batching, config.tensor_parallel
        measured = 1 if sharded else self.replicas
        _, replicas = config.replica_range or (measured, measured)
        threads = int(sharded.cpus_per_process) if sharded else self.replicas * self.threads // replicas
        max_batch_size = batching.max_batch_size or self.max_batch_size
        preferred = batching.preferred_batch_sizes
        if preferred is None:
            # The recipe may allow fewer rows than were measured.
            preferred = [size for size in self.preferred_batch_sizes if size <= max_batch_size]
        is_measured = batching.max_batch_size is None and not batching.preferred_batch_sizes
        return ServingDefaults(
            max_batch_size=max_batch_size,
            max_batch_size_by_length=self.max_batch_size_by_length if is_measured else {},
            preferred_batch_sizes=tuple(preferred),
            timeout_us=self.timeout_us if batching.timeout_us is None else batching.timeout_us,
            replicas=replicas,
            # There may be more replicas than cores.
            threads=config.threads or max(1, threads),
        )


class Perplexity(BaseModel):
    """exp of the mean cross-entropy of tokens in nats, on held-out text."""

    value: PositiveFloat
    standard_error: NonNegativeFloat | None = None
    """Over documents, by the delta method. None if there is only one document, which has no spread."""
    tokens: PositiveInt

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.3f}"
        return f"{self.value:.3f}{error} on {self.tokens:,} tokens"


class GreedyAgreement(BaseModel):
    """The agreement of greedy tokens with those of transformers in float32."""

    prompts: PositiveInt
    tokens: PositiveInt
    """Tokens that were compared, over all prompts."""
    equal_prompts: NonNegativeInt
    """Prompts whose tokens were all equal. Where the two most probable tokens are a near tie, either is right."""


class Generation(BaseModel):
    """The properties of a language model that generates tokens."""

    context_length: PositiveInt
    """Maximum tokens of a prompt and its answer together."""
    vocab_size: PositiveInt
    end_ids: tuple[NonNegativeInt, ...]
    """Tokens that end an answer."""
    has_chat: bool
    """Whether it has a chat template."""
    cache_bytes_per_token: PositiveInt
    """Memory for the keys and values of a token: in bfloat16 for bf16, and in float32 otherwise."""
    perplexity: Perplexity | None = None
    """On the test split; None for an imported model without samples."""
    baseline_perplexity: Perplexity | None = None
    """That of its float32 form, whose greedy tokens equal those of transformers, on the same tokens."""
    greedy: GreedyAgreement
    speculation: PromptLookup | None = None
    """How the engine guesses tokens, if compile measured that it is faster."""

    @property
    def longest_bytes(self) -> int:
        """Size of the cache for the longest answer, including speculated tokens."""
        guessed = self.speculation.tokens if self.speculation else 0
        return (self.context_length + guessed) * self.cache_bytes_per_token


class ModelCard(Scored):
    """The publisher's description of a model: its contents, its lineage and its measurements."""

    task: str
    engine_key: EngineKey
    lineage: Lineage
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    serving: ServingDefaults
    generation: Generation | None = None
    """None for a model that answers batches."""

    quantization: Quantization | None = None
    """None for a model in float."""

    accuracy_split: Split = "validation"
    """The split on which ``score`` was measured: the test split, or without one that which chose the variant."""

    accuracy_rows: PositiveInt | None = None
    """Rows of that split; None if they have no score."""

    scores: str | None = OUTPUT
    """The output that ``predict`` answers by; None for an imported model without labels."""

    max_difference: float
    """Largest absolute difference of a logit from PyTorch's, on the validation split."""

    scaled_difference: float = 0.0
    """The largest one as a share of the magnitude of its column."""

    cosine: float
    """Mean cosine similarity of a row's logits to PyTorch's, on the validation split."""

    differing_rows: float = 0.0
    """Share of its rows in which an output of whole numbers, BOOL or strings differs from PyTorch's."""

    @property
    def score_in_words(self) -> str:
        """The score, and the rows that it was measured on."""
        if self.score is None:
            return "not known: no labelled rows were given"
        return f"{self.score} on the {self.accuracy_split} split"

    @property
    def signature(self) -> Signature:
        """The inputs and outputs of the model."""
        return Signature(
            tuple(tensor.spec() for tensor in self.inputs), tuple(tensor.spec() for tensor in self.outputs)
        )

    def within(self, cores: Sequence[int]) -> Self:
        """Return the card with settings for nodes with these cores, as in ``ServingDefaults.within``.

        GPU settings do not change: they depend on the GPU, not on the cores beside it.
        """
        serving = self.serving.within(cores) if self.engine_key.device == "cpu" else self.serving
        return self.model_copy(update={"serving": serving})

    def served(self, config: ServeConfig) -> ServingDefaults:
        """Return the settings for serving: the recipe's, or else those that compile measured.

        Raises:
            RecipeError: ``max_batch_size`` is above the limit of the TensorRT plan, or below a preferred size.
        """
        max_batch_size = config.batching.max_batch_size or self.serving.max_batch_size
        if max(preferred := config.batching.preferred_batch_sizes or [1]) > max_batch_size:
            raise RecipeError(
                f"serve.batching.preferred_batch_sizes are {list(preferred)}: expected {max_batch_size} at most, "
                "which is max_batch_size"
            ).of("batching.sizes", "serve.batching.preferred_batch_sizes")
        serving, built = self.serving.overridden(config), max(self.engine_key.profile.batch_sizes)
        if self.signature.takes_one_row and serving.max_batch_size > 1:
            raise RecipeError(
                f"serve.batching.max_batch_size is {serving.max_batch_size}: the model takes one row a call; leave it "
                "out, or export the model with a batch size that varies and import it again"
            ).of("batching.sizes", "serve.batching.max_batch_size")
        if runs_plans(self.engine_key.engine) and serving.max_batch_size > built:
            raise RecipeError(
                f"serve.batching.max_batch_size is {serving.max_batch_size}: the plan was built for {built} rows at "
                "most; give as many, or more in compile.batch_sizes and run jobs.compile"
            ).of("batching.sizes", "serve.batching.max_batch_size")
        return serving


class Manifest(ModelCard):
    """A published version, with the sha256 of each of its files."""

    seal: str = Field(default="", exclude=True)
    """The sha256 of the manifest's own file. It distinguishes successive versions with the same number."""

    name: PlainName
    version: PositiveInt
    created: datetime
    size_bytes: int
    """Total size of its files."""

    files: dict[PlainName, str]

    @property
    def has_shards(self) -> bool:
        """Whether its ONNX file has its weights in files beside it."""
        return any(name.startswith(SHARD_PREFIX) for name in self.files)
