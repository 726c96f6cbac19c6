"""The training engine: the model under a plan, its optimizer and its steps, by DeepSpeed."""

from app.training.engine.engine import TrainingEngine, create_engine
from app.training.engine.step import StepResult

__all__ = ["StepResult", "TrainingEngine", "create_engine"]
