"""The recipe as typed values. Imported by every other part of Rayloom; imports none of them."""

from app.config.loading import dump_recipe, load_recipe
from app.config.recipe import (
    BatchingConfig,
    CleanConfig,
    CompileConfig,
    DataConfig,
    EarlyStoppingConfig,
    GatesConfig,
    ImageConfig,
    ModelConfig,
    OptimizerConfig,
    PlanConfig,
    Recipe,
    ScheduleConfig,
    ServeConfig,
    TokenizerConfig,
    TrainConfig,
)

__all__ = [
    "BatchingConfig",
    "CleanConfig",
    "CompileConfig",
    "DataConfig",
    "EarlyStoppingConfig",
    "GatesConfig",
    "ImageConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlanConfig",
    "Recipe",
    "ScheduleConfig",
    "ServeConfig",
    "TokenizerConfig",
    "TrainConfig",
    "dump_recipe",
    "load_recipe",
]
