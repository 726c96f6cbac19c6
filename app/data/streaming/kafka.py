"""A topic of Kafka, read by the offsets of its partitions."""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from app.config import StreamAddress
from app.data.streaming.messages import Message, Offsets, require_retained
from app.errors import BrokerUnreachableError, DataError

_TIMEOUT_S = 5.0
_CONFIG = "RAYLOOM_KAFKA_CONFIG"
"""In the environment: a file of librdkafka's properties, with the credentials."""
_REFUSALS = {
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError._SSL,
}
_OUT_OF_RANGE = {KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET}
_FATAL = {*_REFUSALS, *_OUT_OF_RANGE, KafkaError._ALL_BROKERS_DOWN}
"""The client recovers from other errors by itself, such as a lost connection to one of several brokers."""


class KafkaReader:
    """Reads all partitions of a topic. It joins no group, so it is never rebalanced, and commits nothing."""

    def __init__(self, source: str, address: StreamAddress, start: Mapping[int, int]) -> None:
        self._source, self._name = source, address.name
        self._errors: list[KafkaError] = []
        properties = {
            # librdkafka logs each failure many times a second. Errors are raised anyway.
            "log_level": 2,
            **_properties(),
            "bootstrap.servers": ",".join(address.servers),
            # The client requires a group, but stores no offset for it.
            "group.id": f"rayloom-{uuid.uuid4().hex}",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "error_cb": self._errors.append,
        }
        try:
            self._consumer = Consumer(properties)
        except KafkaException as error:
            raise DataError(
                f"{_CONFIG}: librdkafka refuses the properties ({error.args[0].str()}); correct the file "
                f"{os.environ.get(_CONFIG)!r}"
            ).of("kafka.properties") from error
        try:
            self.start: Offsets = self._assign(start)
        except KafkaException as error:
            self.close()
            self._raise(error.args[0], error)
        except BaseException:
            self.close()
            raise

    def read(self, count: int, timeout_s: float) -> list[Message]:
        """Return the next messages: see ``Reader``."""
        self._errors.clear()
        try:
            found = self._consumer.consume(count, timeout_s)
        except KafkaException as error:
            self._raise(error.args[0], error)
        failures = [failure for failure in (*(message.error() for message in found), *self._errors) if failure]
        if fatal := next((failure for failure in failures if failure.code() in _FATAL), None):
            self._raise(fatal, None)
        return [
            Message(message.partition(), message.offset(), message.value() or b"")
            for message in found
            if message.error() is None
        ]

    def require_answer(self) -> None:
        """Ask the brokers of all partitions: see ``Reader``."""
        self._errors.clear()
        try:
            for partition in self.start:
                self._consumer.get_watermark_offsets(TopicPartition(self._name, partition), timeout=_TIMEOUT_S)
        except KafkaException as error:
            self._raise(error.args[0], error)

    def close(self) -> None:
        """Disconnect from the brokers."""
        self._consumer.close()

    def _assign(self, start: Mapping[int, int]) -> Offsets:
        """Assign all partitions, and return their offsets. Raises DataError if a broker lacks the topic or offset."""
        # List all topics, because asking for one can create it.
        topics = self._consumer.list_topics(timeout=_TIMEOUT_S).topics
        if self._name not in topics:
            raise DataError(
                f"data.source {self._source!r}: the brokers have no topic {self._name!r}; create it or correct the name"
            ).of("stream.unknown", "data.source")
        offsets: Offsets = {}
        for partition in sorted(topics[self._name].partitions):
            first, end = self._consumer.get_watermark_offsets(TopicPartition(self._name, partition), timeout=_TIMEOUT_S)
            offsets[partition] = start.get(partition, first)
            require_retained(self._source, partition, offsets[partition], first, end)
        self._consumer.assign([TopicPartition(self._name, partition, at) for partition, at in offsets.items()])
        return offsets

    def _raise(self, error: KafkaError, cause: Exception | None) -> NoReturn:
        """Raise DataError for permanent errors, else BrokerUnreachableError."""
        causes = [*self._errors, error]
        if refused := next((one for one in causes if one.code() in _REFUSALS), None):
            raise DataError(
                f"data.source {self._source!r}: the brokers refuse the credentials ({refused.str()}); correct the file "
                f"of librdkafka's properties that {_CONFIG} names, or name one where training runs"
            ).of("stream.credentials", "data.source") from cause
        if error.code() in _OUT_OF_RANGE:
            raise DataError(
                f"data.source {self._source!r}: the brokers have deleted messages that were not read yet "
                f"({error.str()}); start a new run, and keep messages for longer"
            ).of("stream.messages_gone", "data.source") from cause
        raise BrokerUnreachableError(
            f"data.source {self._source!r}: no broker answers ({causes[0].str()}); start one, or correct the address"
        ) from cause


def _properties() -> dict[str, str]:
    """Return the properties in the file that the environment names, one KEY=VALUE a line. Raises DataError."""
    if not (path := os.environ.get(_CONFIG)):
        return {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{_CONFIG} is {path!r}, which cannot be read ({error}): correct it").of(
            "file.unreadable"
        ) from error
    pairs = [line.partition("=") for line in map(str.strip, lines) if line and not line.startswith("#")]
    return {key.strip(): value.strip() for key, _, value in pairs}
