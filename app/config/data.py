"""The recipe's ``data``: the sources of examples, and how they become batches."""

from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, PositiveInt, field_validator, model_validator

from app.config.section import LOCATION, Section, Seed
from app.config.sources import ColumnsConfig, SourceConfig, join_sources, require_consistent
from app.config.stream import StreamAddress, StreamConfig, is_stream
from app.errors import RecipeError


class CleanConfig(Section):
    """The examples that are dropped before the split. Texts with several labels are always dropped."""

    drop_empty: bool = Field(default=True, description="drop empty examples")
    deduplicate: bool | None = Field(
        default=None,
        description="keep one of several equal examples; default: for texts, pictures and recordings, but not for rows "
        "of tables",
    )
    min_length: PositiveInt | None = Field(
        default=None, description="drop texts with fewer characters; not for chat; default: any length"
    )
    max_length: PositiveInt | None = Field(
        default=None, description="drop texts with more characters; not for chat; default: any length"
    )
    max_symbol_share: Annotated[float, Field(ge=0.0, le=1.0)] | None = Field(
        default=None,
        description="drop texts with a larger share of characters that are neither letters, digits nor white space, "
        "such as 0.3; default: any share",
    )
    languages: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="drop texts in other languages, such as [en, zh] (ISO 639-1; needs the extra languages); "
        "default: any language",
    )
    max_unreadable: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.01,
        description="refuse a source with a larger share of pictures that cannot be decoded, or of texts "
        "that are not UTF-8; fewer are dropped",
    )
    near_duplicates: Annotated[float, Field(ge=0.5, le=1.0)] | None = Field(
        default=None,
        description="drop texts whose word sequences of five are at least so similar to an earlier text "
        "(Jaccard index, estimated by MinHash), such as 0.8; default: keep them",
    )
    label_noise: Literal["report", "drop"] | None = Field(
        default=None,
        description="for text-classification: find training texts whose label is likely wrong (confident learning). "
        "report: count them and show ten; drop: also remove them from training; default: off",
    )

    @model_validator(mode="after")
    def _lengths_ascend(self) -> Self:
        if self.min_length and self.max_length and self.min_length > self.max_length:
            raise RecipeError(f"min_length {self.min_length} is more than max_length {self.max_length}: swap them").of(
                "range.invalid"
            )
        return self


class TokenizerConfig(Section):
    """The tokenizer: byte pairs that are learned from the training split, or plain bytes."""

    kind: Literal["bpe", "bytes"] = Field(default="bpe", description="bytes: for language modelling")
    vocab_size: PositiveInt = Field(default=8000, description="for bpe: maximum number of tokens")
    max_piece_length: PositiveInt | None = Field(
        default=None,
        description="for bpe: maximum characters of a token, default: 4; for language modelling bytes, default: any",
    )

    @model_validator(mode="after")
    def _bytes_are_not_learned(self) -> Self:
        if self.kind == "bytes" and self != TokenizerConfig.model_construct(kind="bytes"):
            raise RecipeError(
                "kind bytes has one token for each byte and one for the end of a document: "
                "leave vocab_size and max_piece_length out, or set kind to bpe"
            ).of("keys.contradict")
        return self


class ImageConfig(Section):
    """The shape to which images are converted."""

    size: PositiveInt = Field(default=32, description="height and width in pixels")
    channels: Literal[1, 3] = Field(default=3, description="1: grey, 3: RGB")
    background: Literal["white", "black", "grey"] = Field(
        default="white", description="colour behind the transparent parts of an image"
    )


class AudioConfig(Section):
    """The log-mel spectrograms to which audio clips are converted, with a frame every 10 ms."""

    rate: Annotated[int, Field(ge=1000, le=192_000)] = Field(
        default=16_000, description="sample rate in Hz; clips with other rates are resampled"
    )
    seconds: Annotated[float, Field(gt=0.0, le=600.0)] = Field(
        default=1.0, description="length; longer clips are cut, and shorter ones are padded with silence"
    )
    bins: PositiveInt = Field(default=40, description="mel bins per frame")


class ChatConfig(Section):
    """How conversations become blocks of tokens."""

    packing: bool = Field(
        default=True,
        description="put several short conversations into a block, each of which attends to itself alone; false: pad "
        "each to the longest of its batch",
    )
    template: Annotated[str | None, LOCATION] = Field(
        default=None, description="file of a chat template; default: that of the pretrained model's tokenizer"
    )


_MIN_SHARD_BYTES, _MAX_SHARD_BYTES = 4096, 2**30
"""The maximum keeps a column of texts within the 31 bits of Arrow's offsets."""


class ShardsConfig(Section):
    """Sizes of the shards: data is prepared once, as shards in storage, and training reads these."""

    size: ByteSize = Field(default=ByteSize(8_000_000), description="bytes of a shard, such as 8MB")
    window: ByteSize = Field(
        default=ByteSize(256_000_000),
        description="bytes of consecutive samples, over all streams, that are shuffled together; more mix better",
    )
    cache: ByteSize = Field(
        default=ByteSize(8_000_000_000), description="bytes of a node's disk that shards read from elsewhere may take"
    )
    memory: ByteSize = Field(
        default=ByteSize(1_000_000_000),
        description="bytes of hashes and signatures that preparation compares at a time; at least eight times size",
    )

    @model_validator(mode="after")
    def _cache_holds_windows(self) -> Self:
        if self.size < _MIN_SHARD_BYTES:
            raise RecipeError(
                f"size is {self.size} bytes, less than a shard can be: give {_MIN_SHARD_BYTES} or more"
            ).of("shards.size")
        if self.size > _MAX_SHARD_BYTES:
            raise RecipeError(
                f"size is {self.size} bytes, more than a shard can be: give {_MAX_SHARD_BYTES} or less"
            ).of("shards.size")
        if self.memory < 8 * self.size:
            raise RecipeError(
                f"memory is {self.memory} bytes, and a shard has {self.size}: preparation builds a shard of each split "
                f"and its file in memory, so give memory {8 * self.size} bytes or more, or lower size"
            ).of("shards.memory")
        if self.cache < 2 * self.window:
            raise RecipeError(
                f"cache is {self.cache} bytes and window {self.window}: the cache holds the window that is read and "
                f"the next one, so give cache {2 * self.window} bytes or more, or lower window"
            ).of("shards.cache")
        return self


_OF_ALL_SOURCES = ("categories", "numbers", "separator")
"""Keys of columns that say what values mean."""


class DataConfig(Section):
    """The source of the examples, and how they become batches."""

    source: Annotated[str, LOCATION] = Field(
        description="builtin:NAME, or a path or URI of a csv, jsonl, parquet or Arrow file, or of a folder of them; of "
        "an image folder with one subfolder a class, or with IDX files named as MNIST's are; of tar files in "
        "WebDataset's layout; for language modelling also of a text file or a folder of them; or a stream, "
        "nats://HOST:PORT/STREAM?subject=SUBJECT or kafka://HOST:PORT/TOPIC; left out with sources"
    )
    sources: list[SourceConfig] = Field(
        default=[],
        description="in place of source, for labelled samples, language modelling and chat: several sources, mixed by "
        "weight",
    )
    temperature: Annotated[float, Field(ge=1.0)] = Field(
        default=1.0,
        description="for sources without weights: their shares follow size^(1/temperature); 1: natural shares; above "
        "1: small sources come more often",
    )
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.1, description="share of the examples, or for language modelling of the documents"
    )
    test_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        default=None,
        description="share of the examples, or for language modelling of the documents, held out for a test split, "
        "which only jobs.compile reads, to measure the published score; taken from the training split; default: none",
    )
    test_source: Annotated[str | None, LOCATION] = Field(
        default=None,
        description="source of the test split, instead of test_fraction; of the same kind as source. "
        "builtin:fashion or a folder of IDX files: their test files",
    )
    validation_source: Annotated[str | None, LOCATION] = Field(
        default=None,
        description="with stream: source of the validation split, instead of validation_fraction of the first "
        "messages; a csv, jsonl, parquet or Arrow file with the same columns, and for language modelling also a text "
        "file or a folder; messages whose text is in it are not trained on",
    )
    seed: Seed = Field(default=0, description="seed of the split")
    sampling: Literal["natural", "balanced"] = Field(
        default="natural",
        description="for classes: how often training reads a row in an epoch. natural: once; balanced: so that all "
        "labels come equally often within each window",
    )
    columns: ColumnsConfig = ColumnsConfig()
    clean: CleanConfig = CleanConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    image: ImageConfig = ImageConfig()
    audio: AudioConfig = AudioConfig()
    buckets: Annotated[list[PositiveInt], Field(min_length=1)] = Field(
        default=[32, 64, 128, 256],
        description="lengths in tokens to which batches are padded; longer texts are cut at the last one",
    )
    block_length: PositiveInt = Field(
        default=256,
        description="for language modelling and chat: tokens of a sample, and the maximum that the model reads",
    )
    chat: ChatConfig = ChatConfig()
    shards: ShardsConfig = Field(
        default=ShardsConfig(), description="the files in which prepared data lie in storage, and how they are read"
    )
    stream: StreamConfig | None = Field(
        default=None, description="for a source that is a stream: how it is cut into micro-epochs; default: no stream"
    )
    group_column: str | None = Field(
        default=None,
        description="column whose rows with equal values stay in one split; default: each row on its own",
    )

    @model_validator(mode="before")
    @classmethod
    def _sources_have_a_name(cls, given: object) -> object:
        """Name all sources in ``source``."""
        if not isinstance(given, dict) or not given.get("sources") or given.get("source") is not None:
            return given
        sources = [SourceConfig.model_validate(source) for source in given["sources"]]
        return given | {"source": join_sources(sources)}

    @model_validator(mode="after")
    def _sources_can_be_mixed(self) -> Self:
        if not self.sources:
            if self.temperature != 1.0:
                raise RecipeError(
                    f"temperature is {self.temperature}, which only sources have: give them, or leave it out"
                ).of("keys.contradict")
            return self
        if self.source != join_sources(self.sources):
            raise RecipeError(
                f"source is {self.source!r} and there are sources: leave source out, or set it to null"
            ).of("keys.contradict")
        require_consistent(self.sources)
        if self.temperature != 1.0 and self.sources[0].weight is not None:
            raise RecipeError(f"temperature is {self.temperature}, and sources have weights: leave one of them out").of(
                "keys.contradict"
            )
        return self

    def each_source(self) -> list["DataConfig"]:
        """Return the section for each source alone."""
        if not self.sources:
            return [self]
        shared = {key: getattr(self.columns, key) for key in _OF_ALL_SOURCES}
        given = [(one.source, (one.columns or self.columns).model_copy(update=shared)) for one in self.sources]
        return [self.model_copy(update={"source": uri, "columns": own, "sources": []}) for uri, own in given]

    @property
    def held_out_fraction(self) -> float:
        """Share of a stream's messages that is held out for validation."""
        return 0.0 if self.validation_source else self.validation_fraction

    @model_validator(mode="after")
    def _sources_mean_the_same(self) -> Self:
        """Refuse keys of a source's own columns that are read of ``data.columns`` alone."""
        for place, source in enumerate(self.sources):
            for key in _OF_ALL_SOURCES if source.columns else ():
                own = getattr(source.columns, key)
                if own not in (getattr(ColumnsConfig(), key), getattr(self.columns, key)):
                    raise ValueError(
                        f"sources.{place}.columns.{key} is {own!r}, and it is one for all sources: set "
                        f"data.columns.{key}"
                    )
        return self

    @model_validator(mode="after")
    def _stream_is_whole(self) -> Self:
        if self.validation_source is not None and self.stream is None:
            raise ValueError("validation_source is for a source that is a stream; others hold out validation_fraction")
        if self.validation_source is not None and is_stream(self.validation_source):
            raise RecipeError(f"validation_source {self.validation_source!r} is a stream: give a file or a folder").of(
                "stream.validation"
            )
        if self.sources:
            if self.stream or any(is_stream(one.source) for one in self.sources):
                raise RecipeError(
                    "sources are mixed, and a stream is read alone: set source to it, or leave it out"
                ).of("keys.contradict")
            return self
        if is_stream(self.source):
            StreamAddress.parse(self.source)  # raises ValueError with the reason
        if is_stream(self.source) and self.stream is None:
            raise RecipeError(f"source {self.source!r} is a stream: set stream: {{}}, with its labels").of(
                "recipe.missing"
            )
        if self.stream is not None and not is_stream(self.source):
            raise RecipeError(
                f"stream is for sources nats:// and kafka://, and source is {self.source!r}: leave it out"
            ).of("keys.contradict")
        return self

    @model_validator(mode="after")
    def _groups_are_whole(self) -> Self:
        if self.group_column is not None and self.clean.deduplicate is False:
            raise RecipeError(
                f"group_column is {self.group_column!r} and clean.deduplicate is false: equal inputs of two groups "
                "could be in two splits; leave one of them out"
            ).of("keys.contradict")
        return self

    @model_validator(mode="after")
    def _splits_leave_room(self) -> Self:
        if self.test_fraction is not None and self.test_source is not None:
            raise ValueError("test_fraction and test_source both define the test split: leave one out")
        if (held_out := self.validation_fraction + (self.test_fraction or 0.0)) >= 1.0:
            raise ValueError(
                f"validation_fraction and test_fraction add up to {held_out:g}, which leaves nothing to train on: "
                "lower one"
            )
        return self

    @field_validator("buckets")
    @classmethod
    def _buckets_ascend(cls, buckets: list[int]) -> list[int]:
        if buckets != sorted(set(buckets)):
            raise RecipeError(f"lengths must ascend without repeats, got {buckets}").of("lengths.order")
        return buckets
