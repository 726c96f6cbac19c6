"""The recipe's ``data``: the sources of examples, and how they become batches."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from app.config.section import Section


class CleanConfig(Section):
    """The examples that are dropped before the split. Texts with several labels are always dropped."""

    drop_empty: bool = Field(default=True, description="drop empty examples")
    deduplicate: bool = Field(default=True, description="keep one of several equal examples")


class ColumnsConfig(Section):
    """The columns of a csv, jsonl or parquet source."""

    input: str = Field(default="text", description="column of the text")
    label: str = Field(default="label", description="column of the class; language modelling has none")


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
            raise ValueError(
                "kind bytes has one token for each byte and one for the end of a document: "
                "leave vocab_size and max_piece_length out, or set kind to bpe"
            )
        return self


class ImageConfig(Section):
    """The shape to which images are converted."""

    size: PositiveInt = Field(default=32, description="height and width in pixels")
    channels: Literal[1, 3] = Field(default=3, description="1: grey, 3: RGB")


class ChatConfig(Section):
    """How conversations become blocks of tokens."""

    packing: bool = Field(
        default=True,
        description="put several short conversations into a block, each of which attends to itself alone; false: pad "
        "each to the longest of its batch",
    )
    template: str | None = Field(
        default=None, description="file of a chat template; default: that of the pretrained model's tokenizer"
    )


class DataConfig(Section):
    """The source of the examples, and how they become batches."""

    source: str = Field(
        description="builtin:NAME, or a path or URI of a csv, jsonl or parquet file; of an image folder with one "
        "subfolder a class, or with IDX files named as MNIST's are; for language modelling also of a text file or a "
        "folder of files"
    )
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.1, description="share of the examples, or for language modelling of the documents"
    )
    test_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        default=None,
        description="share of the examples held out for a test split, which only jobs.compile reads, to measure the "
        "published accuracy; taken from the training split; default: none",
    )
    test_source: str | None = Field(
        default=None,
        description="source of the test split, instead of test_fraction; of the same kind as source. "
        "builtin:fashion or a folder of IDX files: their test files",
    )
    seed: int = Field(default=0, description="seed of the split")
    columns: ColumnsConfig = ColumnsConfig()
    clean: CleanConfig = CleanConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    image: ImageConfig = ImageConfig()
    buckets: Annotated[list[PositiveInt], Field(min_length=1)] = Field(
        default=[32, 64, 128, 256],
        description="lengths in tokens to which batches are padded; longer texts are cut at the last one",
    )
    block_length: PositiveInt = Field(
        default=256,
        description="for language modelling and chat: tokens of a sample, and the maximum that the model reads",
    )
    chat: ChatConfig = ChatConfig()

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
            raise ValueError(f"lengths must ascend without repeats, got {buckets}")
        return buckets
