"""The judgement of a trained model. Each task names the judge of its models; no judge knows the others."""

from app.tasks.judgement.base import Judge, Predictions, places_of, spread

__all__ = ["Judge", "Predictions", "places_of", "spread"]
