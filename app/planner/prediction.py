"""A step as the planner predicted it, and as it was measured."""

from pydantic import BaseModel


class MeasuredRun(BaseModel):
    """What a run's own records say of its steps."""

    step_s: float
    """Median of the steps."""
    memory_bytes: int
    """Peak of the first worker."""
    communication: float | None = None
    """Share of the step in which communication was not hidden; None without ``train.profile``."""


class Prediction(BaseModel):
    """A step as it was predicted, and as it was measured."""

    step_s: float
    error: float | None
    """The error that is stated for such hardware; None: not validated."""
    memory_bytes: int
    communication: float
    measured: MeasuredRun

    def differences(self) -> list[str]:
        """Return in words what differs by more than the stated error."""
        if self.error is None:
            return []
        measured = self.measured
        pairs = [
            ("a step", self.step_s, measured.step_s, f"{measured.step_s:.3g} s", f"{self.step_s:.3g} s"),
            (
                "memory",
                self.memory_bytes,
                measured.memory_bytes,
                f"{measured.memory_bytes / 2**30:.2f} GiB",
                f"{self.memory_bytes / 2**30:.2f} GiB",
            ),
        ]
        texts = [
            f"{what} took {was}, and {said} ± {self.error:.0%} was predicted"
            for what, predicted, found, was, said in pairs
            if abs(found / predicted - 1) > self.error
        ]
        shared = measured.communication
        if shared is not None and abs(shared - self.communication) > self.error:
            texts.append(f"communication took {shared:.0%} of a step, and {self.communication:.0%} was predicted")
        return texts
