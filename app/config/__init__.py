"""The recipe as typed values. Every other part of Rayloom imports it, and it imports none of them."""

from app.config.alerts import AlertConfig
from app.config.augment import (
    AugmentAudioConfig,
    AugmentConfig,
    AugmentImageConfig,
    AugmentTextConfig,
    MixConfig,
    RandAugmentConfig,
)
from app.config.compile import (
    GENERATION_ENGINES,
    MAX_SHARD_MB,
    PLAN_ENGINES,
    CalibrationConfig,
    CalibrationMethod,
    CompileConfig,
    ComputePrecision,
    EngineName,
    GatesConfig,
    Int8FinetuneConfig,
    ObjectiveConfig,
)
from app.config.curriculum import CurriculumConfig
from app.config.data import AudioConfig, CleanConfig, DataConfig, ImageConfig, ShardsConfig, TokenizerConfig
from app.config.layout import Layout
from app.config.loading import (
    dump_recipe,
    load_recipe,
    load_stored_recipe,
    local_paths,
    parse_stored_recipe,
    recipe_keys,
    with_values,
)
from app.config.metrics import Mode
from app.config.named_model import load_job_recipe, names_model, reads_files, recipe_of_model
from app.config.notify import EmailConfig, NotifyConfig, WebhookConfig
from app.config.placement import ACCELERATOR, Placement, of_kind
from app.config.plan import AutoPlan, PlanConfig, Precision
from app.config.plan_rules import ModelTraits, Setting, refusal
from app.config.reading import embedded, read_text, title_of
from app.config.recipe import (
    BUILT_IN_TASKS,
    TENSORS,
    AdapterConfig,
    LoraConfig,
    ModelConfig,
    Recipe,
)
from app.config.rollout import Percent, Role
from app.config.serve import BatchingConfig, CascadeConfig, OnDemandConfig, ServeConfig, TensorParallelConfig, TlsConfig
from app.config.sources import ColumnsConfig, FieldConfig, SourceConfig
from app.config.stream import StreamAddress, StreamConfig
from app.config.tracking import TrackingConfig, WandbConfig
from app.config.train import (
    CheckpointConfig,
    EarlyStoppingConfig,
    LoaderConfig,
    OptimizerConfig,
    ProfileConfig,
    PruneConfig,
    ScheduleConfig,
    TeacherConfig,
    TrainConfig,
)
from app.config.tune import Objective, StopConfig, TuneConfig
from app.config.yaml_text import parse_yaml, yaml_problem

__all__ = [
    "ACCELERATOR",
    "BUILT_IN_TASKS",
    "GENERATION_ENGINES",
    "MAX_SHARD_MB",
    "PLAN_ENGINES",
    "TENSORS",
    "AdapterConfig",
    "AlertConfig",
    "AudioConfig",
    "AugmentAudioConfig",
    "AugmentConfig",
    "AugmentImageConfig",
    "AugmentTextConfig",
    "AutoPlan",
    "BatchingConfig",
    "CalibrationConfig",
    "CalibrationMethod",
    "CascadeConfig",
    "CheckpointConfig",
    "CleanConfig",
    "ColumnsConfig",
    "CompileConfig",
    "ComputePrecision",
    "CurriculumConfig",
    "DataConfig",
    "EarlyStoppingConfig",
    "EmailConfig",
    "EngineName",
    "FieldConfig",
    "GatesConfig",
    "ImageConfig",
    "Int8FinetuneConfig",
    "Layout",
    "LoaderConfig",
    "LoraConfig",
    "MixConfig",
    "Mode",
    "ModelConfig",
    "ModelTraits",
    "NotifyConfig",
    "Objective",
    "ObjectiveConfig",
    "OnDemandConfig",
    "OptimizerConfig",
    "Percent",
    "Placement",
    "PlanConfig",
    "Precision",
    "ProfileConfig",
    "PruneConfig",
    "RandAugmentConfig",
    "Recipe",
    "Role",
    "ScheduleConfig",
    "ServeConfig",
    "Setting",
    "ShardsConfig",
    "SourceConfig",
    "StopConfig",
    "StreamAddress",
    "StreamConfig",
    "TeacherConfig",
    "TensorParallelConfig",
    "TlsConfig",
    "TokenizerConfig",
    "TrackingConfig",
    "TrainConfig",
    "TuneConfig",
    "WandbConfig",
    "WebhookConfig",
    "dump_recipe",
    "embedded",
    "load_job_recipe",
    "load_recipe",
    "load_stored_recipe",
    "local_paths",
    "names_model",
    "of_kind",
    "parse_stored_recipe",
    "parse_yaml",
    "read_text",
    "reads_files",
    "recipe_keys",
    "recipe_of_model",
    "refusal",
    "title_of",
    "with_values",
    "yaml_problem",
]
