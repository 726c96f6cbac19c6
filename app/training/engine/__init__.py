"""DeepSpeed's engine: the model under a plan, its optimizer and the steps of training."""

from app.training.engine.engine import TrainingEngine, create_engine
from app.training.engine.step import StepResult

__all__ = ["StepResult", "TrainingEngine", "create_engine"]
