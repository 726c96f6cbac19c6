"""All that a run of the benchmark finds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.compile.records import VariantRecord
from app.compile.variants import Variant
from app.config import ComputePrecision
from benchmarks.compile.coldstart import Starts
from benchmarks.compile.models import Model, Setting
from benchmarks.compile.speed import Race
from benchmarks.machine import Conditions


@dataclass(frozen=True)
class Compiled:
    """The measurements of one model."""

    model: Model
    records: Mapping[ComputePrecision, VariantRecord]
    """The records of OpenVINO's variants."""

    refused: Mapping[ComputePrecision, str]
    """Precisions in which there is no variant to measure, and why."""

    chosen: Variant
    """The variant that Rayloom serves."""

    race: Race

    def size_ratio(self, precision: ComputePrecision) -> float:
        """Bytes of the file / those of fp32's."""
        return self.records[precision].size_bytes / self.records["fp32"].size_bytes

    def accuracy_kept(self, precision: ComputePrecision) -> float:
        """Accuracy / that of fp32."""
        kept, whole = self.records[precision].accuracy, self.records["fp32"].accuracy
        assert kept is not None
        assert whole is not None
        return kept / whole

    @property
    def settings(self) -> list[Setting]:
        """The timed settings."""
        return list(self.race.latencies)


@dataclass(frozen=True)
class Findings:
    """All that a run of the benchmark found."""

    compiled: Mapping[str, Compiled]
    """The measurements by the model's name."""

    left_out: Mapping[str, str]
    """Models that could not be had, and why."""

    starts: Sequence[Starts]
    threads: int
    num_rounds: int
    conditions: Conditions
