"""The recipe's ``data.stream``, and the address of a stream."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self, cast, get_args
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, PositiveInt, field_validator

from app.config.section import Fraction, Section
from app.errors import RecipeError

StreamScheme = Literal["nats", "kafka"]
_SCHEMES: tuple[StreamScheme, ...] = get_args(StreamScheme)
_EXPECTED = "expected nats://HOST:PORT/STREAM?subject=SUBJECT or kafka://HOST:PORT/TOPIC"


def is_stream(source: str) -> bool:
    """Return whether ``data.source`` names a stream of a broker."""
    return source.partition("://")[0] in _SCHEMES


@dataclass(frozen=True)
class StreamAddress:
    """A stream of NATS JetStream, or a topic of Kafka."""

    scheme: StreamScheme
    servers: tuple[str, ...]
    """HOST:PORT of one server or several."""
    name: str
    """The stream, or the topic."""
    subject: str | None
    """The subject of NATS that is read. None: all of the stream."""

    @classmethod
    def parse(cls, source: str) -> Self:
        """Return the address that ``data.source`` holds. Raises ValueError for one that is not complete."""
        parts = urlsplit(source)
        # The message must not repeat a password.
        if "@" in parts.netloc:
            raise RecipeError(
                "source has a user or a password in it, and a recipe must not contain secrets: leave it out, and give "
                "it in the environment: NATS_USER and NATS_PASSWORD or NATS_CREDS, or RAYLOOM_KAFKA_CONFIG"
            ).of("secret.in_recipe")
        servers, name, query = parts.netloc.split(","), parts.path.strip("/"), parse_qs(parts.query)
        if not all(servers) or not name or "/" in name:
            raise RecipeError(f"source {source!r} is not the address of a stream: {_EXPECTED}").of("stream.address")
        if unknown := sorted(query.keys() - ({"subject"} if parts.scheme == "nats" else set())):
            raise RecipeError(f"source {source!r} has the unknown parameter {unknown[0]!r}: {_EXPECTED}").of(
                "stream.address"
            )
        return cls(cast(StreamScheme, parts.scheme), tuple(servers), name, query.get("subject", [None])[0])


class StreamConfig(Section):
    """How a stream is cut into micro-epochs. Each is an epoch of training, and its messages are trained on once."""

    labels: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="all labels that messages may have, because part of a stream may lack some: classes, or for "
        "token-classification the types of entities; left out for other tasks",
    )
    samples: PositiveInt = Field(
        default=10_000,
        description="maximum training samples of a micro-epoch (blocks, for language modelling and chat); only whole "
        "batches; the rest begins the next micro-epoch",
    )
    seconds: Annotated[float, Field(gt=0.0)] = Field(
        default=60.0,
        description="seconds from its first message until a micro-epoch ends with fewer samples, once it has a batch",
    )
    idle_seconds: Annotated[float, Field(gt=0.0)] | None = Field(
        default=300.0,
        description="seconds without a message after which the stream has ended, and training with it; null: never",
    )
    max_bad: Fraction = Field(
        default=0.01,
        description="share of messages without the columns, or without one of the labels, above which training fails",
    )

    @field_validator("labels")
    @classmethod
    def _labels_are_distinct(cls, labels: list[str] | None) -> list[str] | None:
        if labels and (repeated := sorted({label for label in labels if labels.count(label) > 1})):
            raise RecipeError(f"{repeated[0]!r} is named twice: name each label once").of("names.twice")
        return labels
