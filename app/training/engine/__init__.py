"""The training engine: the model under a plan, its optimizer and its steps, by DeepSpeed."""

from app.training.engine.deepspeed_engine import StepResult
from app.training.engine.engine import TrainingEngine, create_engine

__all__ = ["StepResult", "TrainingEngine", "create_engine"]
