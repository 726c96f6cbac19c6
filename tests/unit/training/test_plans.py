"""Plans that cannot run are refused before a worker starts, with the rule and the nearest plan that can."""

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from torch import nn
from upath import UPath

from app.config import TrainConfig, load_recipe
from app.config.layout import lay_out
from app.config.plan import PlanConfig, PowerSgdConfig, ZeroPlusPlusConfig
from app.config.plan_rules import ModelTraits, Setting, refusal
from app.models.factory import build_model
from app.models.traits import traits_of
from app.runs import Run
from app.tasks import prepare
from app.training.engine.deepspeed_engine import deepspeed_config, with_bounded_buffers
from app.training.engine.optimizer import create_optimizer
from app.training.plan import TrainingPlan
from app.training.ray_worker import fit
from app.training.records import Ending
from app.training.run import prepare_run, skipped_workers
from app.training.stop_request import StopRequest
from tests.helpers import ROOT
from tests.parity.plans import FACTS, MODELS
from tests.wording import refused

GPT = ROOT / "recipes/stdlib_gpt.yaml"


GPT_TRAITS = ModelTraits("GPT", layers=7, tensor_divisor=4, checkpoints_activations=True)
CNN_TRAITS = ModelTraits("CNN", layers=None, tensor_divisor=None, checkpoints_activations=False)
QUANTIZED = ZeroPlusPlusConfig(quantized_weights=True)
TWO = Setting((2, 2), "fp32", "cpu", "adamw")


@pytest.mark.parametrize(
    ("plan", "setting", "expected"),
    [
        ({}, replace(TWO, precision="fp16"),
         "precision fp16 takes device gpu, got cpu, under every plan: set precision to bf16 or fp32"),
        ({"tensor": 2}, replace(TWO, workers=(1, 2)),
         "workers [1, 2] grow and shrink, which tensor 2 x pipeline 1 cannot | tensor: 1"),
        ({"tensor": 3}, TWO, "tensor 3 x pipeline 1 does not divide the 2 workers | tensor: 2"),
        ({"pipeline": 2, "zero_stage": 2}, TWO,
         "pipeline 2 keeps gradients and parameters whole: zero_stage 1, got 2 | pipeline: 1"),
        ({"pipeline": 4, "zero_stage": 0}, replace(TWO, workers=(4, 4)),
         "with zero_stage 0 each stage of a pipeline would be clipped by a norm of its own: zero_stage 1, got 0 "
         "| zero_stage: 1"),
        ({"tensor": 2, "zero_stage": 2}, TWO,
         "tensor 2 splits the matrices already: zero_stage 0 or 1 with it, got 2 | tensor: 1"),
        ({"tensor": 2, "zero_stage": 0}, replace(TWO, precision="bf16", model=GPT_TRAITS),
         "with zero_stage 0, tensor 2 would add up the gradients of micro-batches in bf16: zero_stage 1, whose "
         "gradients are added up in float32, got 0 | tensor: 1"),
        ({"offload": "cpu", "zero_stage": 0}, TWO,
         "offload moves a split optimizer: zero_stage 1, 2 or 3, got 0 | offload: none"),
        ({"offload": "cpu", "tensor": 2}, TWO, "offload takes tensor 1 and pipeline 1 | offload: none"),
        ({"offload": "cpu"}, replace(TWO, optimizer="sgd"),
         "offload runs DeepSpeed's Adam on the CPU: optimizer adamw, got sgd | offload: none"),
        ({"offload_param": "cpu"}, TWO,
         "offload_param cpu moves split parameters: zero_stage 3, got 1 | offload_param: none"),
        ({"offload": "nvme", "zero_stage": 2}, TWO, "offload nvme takes zero_stage 3, got 2 | offload: none"),
        ({"offload": "nvme", "zero_stage": 3}, TWO,
         "offload nvme takes nvme_path, the absolute path of a folder on a fast local disk, got None | offload: none"),
        ({"offload": "nvme", "zero_stage": 3, "nvme_path": "disk"}, TWO,
         "offload nvme takes nvme_path, the absolute path of a folder on a fast local disk, got disk | offload: none"),
        ({"offload": "nvme", "zero_stage": 3, "nvme_path": "/disk"}, replace(TWO, workers=(1, 2)),
         "offload nvme takes a fixed number of workers, got [1, 2] | offload: none"),
        ({"offload_param": "nvme", "zero_stage": 2}, TWO,
         "offload_param nvme moves split parameters: zero_stage 3, got 2 | offload_param: none"),
        ({"offload_param": "nvme", "zero_stage": 3}, TWO,
         "offload_param nvme takes nvme_path, the absolute path of a folder on a fast local disk, got None "
         "| offload_param: none"),
        ({"offload_param": "nvme", "zero_stage": 3, "nvme_path": "/disk"},
         replace(TWO, model=replace(CNN_TRAITS, has_frozen=True)),
         "offload_param nvme moves parameters that are trained, and model CNN has frozen ones: set offload_param to "
         "cpu | offload_param: none"),
        ({"offload_param": "nvme", "zero_stage": 3, "nvme_path": "/disk", "zero_plus_plus": QUANTIZED},
         replace(TWO, device="gpu"),
         "offload_param nvme moves parameters that no rank holds twice: leave zero_plus_plus out "
         "| zero_plus_plus: {}"),
        ({"zero_stage": 3, "zero_plus_plus": QUANTIZED}, TWO,
         "zero_plus_plus takes zero_stage 3 on gpus, got zero_stage 3 on a cpu | zero_plus_plus: {}"),
        ({"zero_stage": 2, "zero_plus_plus": QUANTIZED}, replace(TWO, device="gpu"),
         "zero_plus_plus takes zero_stage 3 on gpus, got zero_stage 2 on a gpu | zero_plus_plus: {}"),
        ({"zero_stage": 3, "zero_plus_plus": ZeroPlusPlusConfig(hpz_partition_size=3)}, replace(TWO, device="gpu"),
         "hpz_partition_size 3 does not divide the workers | zero_plus_plus: {}"),
        *(
            (plan | {"powersgd": PowerSgdConfig()}, setting,
             "powersgd replaces DeepSpeed's reduction: zero_stage 0, fp32, tensor 1, pipeline 1 | powersgd: null")
            for plan, setting in [
                ({}, TWO),
                ({"zero_stage": 0, "tensor": 2}, TWO),
                ({"zero_stage": 0}, replace(TWO, precision="bf16")),
            ]
        ),
        ({"zero_stage": 0, "powersgd": PowerSgdConfig(), "communication_data_type": "bf16"}, TWO,
         "powersgd replaces DeepSpeed's reduction, so communication_data_type has no effect: leave one of them out, "
         "got communication_data_type bf16 | communication_data_type: null"),
        ({"zero_stage": 0, "powersgd": PowerSgdConfig()}, replace(TWO, model=replace(CNN_TRAITS, has_scalars=True)),
         "powersgd takes parameters with dimensions, and model CNN has scalars | powersgd: null"),
        ({"pipeline": 2}, replace(TWO, model=CNN_TRAITS),
         "model CNN is not staged (app.models.staged), so pipeline is 1 | pipeline: 1"),
        ({"pipeline": 8}, replace(TWO, workers=(8, 8), model=GPT_TRAITS),
         "pipeline 8 has more stages than model GPT has layers (7) | pipeline: 4"),
        ({"tensor": 2}, replace(TWO, model=GPT_TRAITS, inputs=("input_ids", "attention_mask")),
         "tensor 2 x pipeline 1 takes one input for staged model GPT, got input_ids, attention_mask of the task "
         "| tensor: 1"),
        ({"tensor": 2}, replace(TWO, model=CNN_TRAITS),
         "model CNN has no matrices that can be split (app.models.staged), so tensor is 1 | tensor: 1"),
        ({"tensor": 8}, replace(TWO, workers=(8, 8), model=GPT_TRAITS),
         "tensor 8 does not divide 4: the heads of model GPT, or the common divisor of its matrices' widths "
         "| tensor: 4"),
        ({"tensor": 2, "pipeline": 2}, replace(TWO, workers=(4, 4), model=CNN_TRAITS),
         "model CNN is not staged (app.models.staged), so pipeline is 1 | tensor: 1, pipeline: 1"),
        ({"activation_checkpointing": True}, replace(TWO, model=CNN_TRAITS),
         "model CNN is neither staged nor of Hugging Face: activation_checkpointing is false "
         "| activation_checkpointing: false"),
        ({"pipeline": 2}, replace(TWO, precision="fp16", device="gpu"),
         "pipeline 2 would sum the gradients of tied layers in fp16: set precision to bf16, whose gradients are "
         "summed in float32 | pipeline: 1"),
        ({"tensor": 2}, replace(TWO, sync_batch_norm=True),
         "sync_batch_norm needs the whole model on each worker: expected tensor 1 and pipeline 1, got tensor 2 "
         "and pipeline 1 | tensor: 1"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_run_is_refused_with_the_nearest_that_can(
    plan: dict[str, Any], setting: Setting, expected: str
) -> None:
    assert refusal(PlanConfig(**plan), setting) == expected.replace(" | ", "; the nearest plan that can run has ")


@pytest.mark.parametrize(
    ("plan", "setting"),
    [
        ({"tensor": 2, "zero_stage": 0}, TWO),
        ({"zero_stage": 3, "offload": "cpu", "offload_param": "cpu"}, replace(TWO, workers=(1, 2))),
        ({"zero_stage": 3, "offload": "nvme", "nvme_path": "/disk"}, TWO),
        ({"zero_stage": 3, "offload_param": "nvme", "nvme_path": "/disk"}, replace(TWO, optimizer="sgd")),
        ({"zero_stage": 3, "zero_plus_plus": ZeroPlusPlusConfig(hpz_partition_size=2)}, replace(TWO, device="gpu")),
        ({"zero_stage": 0, "powersgd": PowerSgdConfig()}, TWO),
        ({}, replace(TWO, precision="fp16", device="gpu")),
        ({"pipeline": 7}, replace(TWO, workers=(7, 7), model=GPT_TRAITS, inputs=("input_ids",))),
        ({"tensor": 2, "pipeline": 4, "activation_checkpointing": True},
         replace(TWO, workers=(8, 8), model=GPT_TRAITS, inputs=("input_ids",))),
        ({}, replace(TWO, sync_batch_norm=True)),
        ({}, replace(TWO, model=GPT_TRAITS, inputs=("input_ids", "attention_mask"))),
        ({"tensor": 2}, replace(TWO, model=replace(CNN_TRAITS, tensor_divisor=2), inputs=("pixels", "mask"))),
    ],
)  # fmt: skip
def test_a_plan_that_can_run_is_not_refused(plan: dict[str, Any], setting: Setting) -> None:
    assert refusal(PlanConfig(**plan), setting) is None


def test_a_recipe_whose_plan_cannot_run_is_refused() -> None:
    with refused("plan.cannot_run", "train.plan"):
        load_recipe(GPT, ["train.plan.tensor=3"])


@pytest.mark.parametrize("micro_batch", [5, 7, 100])
def test_a_micro_batch_that_does_not_divide_is_refused_with_the_nearest_that_does(micro_batch: int) -> None:
    with refused("batch.uneven", "train"):
        load_recipe(GPT, [f"train.plan.micro_batch={micro_batch}"])


@pytest.mark.parametrize(
    ("share", "plan", "sizes"),
    [
        (67, {}, [34, 33]),
        (64, {}, [64]),
        (96, {}, [48, 48]),
        (131, {}, [44, 44, 43]),
        (96, {"micro_batch": 32}, [32, 32, 32]),
        (96, {"pipeline": 2}, [48, 48]),
        (67, {"pipeline": 2}, [1] * 67),  # a pipeline takes micro-batches of one size
    ],
)
def test_a_share_becomes_the_fewest_micro_batches_that_fit(share: int, plan: dict[str, int], sizes: list[int]) -> None:
    layout = lay_out(PlanConfig(**plan), global_batch_size=2 * share, workers=2 * plan.get("pipeline", 1))
    made = np.array_split(np.arange(2 * share)[1::2], layout.gradient_accumulation)
    assert [len(micro_batch) for micro_batch in made] == sizes
    assert (layout.micro_batch, layout.share) == (sizes[0], share)


def test_a_range_of_workers_skips_those_that_cannot_share_out_the_batch_and_says_so() -> None:
    config = load_recipe(ROOT / "recipes/digits.yaml", ["train.workers=[8, 64]"]).train
    assert config.worker_counts == [8, 16, 32, 64]
    assert skipped_workers(config) == (
        "train.workers [8, 64]: 8, 16, 32, 64 workers can share out a global batch of 64; other numbers are skipped"
    )
    assert skipped_workers(load_recipe(ROOT / "recipes/digits.yaml", ["train.workers=[1, 2]"]).train) is None


def test_ray_is_asked_for_no_number_of_workers_that_cannot_share_out_the_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {}

    def run(_: DataParallelTrainer, **arguments: Any) -> SimpleNamespace:
        given.update(arguments)
        ending = Ending(
            records=[], stop_request=StopRequest.NONE, step=1, workers=8, resumed_from_step=0, first_step_s=None
        )
        return SimpleNamespace(error=None, return_value=pickle.dumps(ending))

    monkeypatch.setattr("ray.put", lambda _: None)
    monkeypatch.setattr(DataParallelTrainer, "_initialize_and_run_controller", run)
    recipe = load_recipe(ROOT / "recipes/digits.yaml", ["train.workers=[5, 64]"])
    fit(TrainingPlan.of(recipe, prepare(recipe)), UPath(tmp_path))
    policy = pickle.loads(pickle.dumps(given["scaling_policy"]))  # as Ray sends it to its controller
    scaling = policy.scaling_config
    assert (scaling.min_workers, scaling.max_workers) == (8, 64)
    rooms = (7.0, 15.0, 63.0, 64.0, 99.0)
    assert [policy._count_possible_workers({"node": {"CPU": cpus}}) for cpus in rooms] == [0, 8, 32, 64, 64]


def test_a_model_says_how_it_can_be_cut() -> None:
    traits = traits_of(build_model(MODELS["gpt"], FACTS))
    assert (traits.layers, traits.tensor_divisor) == (7, 4)  # embedding, four blocks, norm, output


def test_a_tensor_degree_divides_what_can_be_split() -> None:
    llama = MODELS["llama"].model_copy(update={"args": MODELS["llama"].args | {"num_key_value_heads": 2}})
    assert traits_of(build_model(llama, FACTS)).tensor_divisor == 2
    plain = torch.nn.Linear(8, 8)
    plain.heads = 4  # which tells nobody where to split it
    assert traits_of(plain).tensor_divisor is None
    assert not traits_of(plain).has_scalars
    plain.temperature = torch.nn.Parameter(torch.tensor(1.0))
    assert traits_of(plain).has_scalars


def test_a_model_that_is_cut_takes_one_input_and_is_refused_another_before_workers_start(tmp_path: Path) -> None:
    source = tmp_path / "reviews.jsonl"
    source.write_text("".join(f'{{"text": "review {n}", "label": "{n % 2}"}}\n' for n in range(200)), encoding="utf-8")
    keys = [f"data.source={source}", "model={factory: app.models.gpt:gpt}", "train.plan={tensor: 2}"]
    with refused("plan.cannot_run", "train.plan"):
        prepare_run(Run.start("train", load_recipe("recipes/reviews.yaml", keys)))


def test_batch_norm_in_bf16_on_a_cpu_is_refused_unless_it_is_computed_in_float32() -> None:
    given = ["model.factory=tests.parity.numerics:NormalisedCnn", "model.args={}", "train.precision=bf16"]
    with refused("batch_norm.precision", "train.precision"):
        prepare_run(Run.start("train", load_recipe(ROOT / "recipes/digits.yaml", given)))
    prepare_run(Run.start("train", load_recipe(ROOT / "recipes/digits.yaml", [*given, "train.sync_batch_norm=true"])))


def test_statistics_over_all_workers_are_refused_to_a_model_without_batch_norm() -> None:
    recipe = load_recipe(ROOT / "recipes/digits.yaml", ["train.sync_batch_norm=true"])
    with refused("batch_norm.none", "train.sync_batch_norm"):
        prepare_run(Run.start("train", recipe))


def test_neighbours_share_matrices_and_ranks_of_one_stage_share_data() -> None:
    layout = lay_out(PlanConfig(tensor=2, pipeline=2, micro_batch=4), global_batch_size=16, workers=8)
    assert (layout.data, layout.gradient_accumulation, layout.workers) == (2, 2, 8)
    places = [(layout.data_rank(rank), layout.tensor_rank(rank)) for rank in range(8)]
    assert places == 2 * [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_deepspeed_gets_the_plan_every_default_that_moved_and_what_the_recipe_adds() -> None:
    plan = ["train.plan={zero_stage: 2, micro_batch: 8}", "train.precision=bf16"]
    added = "train.deepspeed={zero_optimization: {reduce_bucket_size: 1000}, dump_state: true}"
    config = load_recipe(GPT, [*plan, added]).train
    made = deepspeed_config(config, config.layout(2))
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [made[size] for size in sizes] == [32, 8, 2]
    assert made["gradient_clipping"] == 1.0
    assert made["bf16"] == {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}
    assert made["zero_optimization"]["stage"] == 2
    assert made["zero_optimization"]["reduce_bucket_size"] == 1000
    assert made["dump_state"]


def test_zero_plus_plus_reaches_deepspeed() -> None:
    keys = "{hpz_partition_size: 2, quantized_weights: true, quantized_gradients: true}"
    config = load_recipe(GPT, ["train.device=gpu", f"train.plan={{zero_stage: 3, zero_plus_plus: {keys}}}"]).train
    made = deepspeed_config(config, config.layout(2))["zero_optimization"]
    assert made["zero_hpz_partition_size"] == 2
    assert made["zero_quantized_weights"] is made["zero_quantized_gradients"] is True


def test_deepspeeds_own_keys_refine_what_the_recipe_asks_for() -> None:
    given = "train.deepspeed={fp16: {initial_scale_power: 8}, zero_optimization: {offload_optimizer: {ratio: 0.5}}}"
    config = load_recipe(GPT, ["train.plan={zero_stage: 3, offload: cpu}", given]).train
    made = deepspeed_config(config, config.layout(2))
    assert made["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False, "ratio": 0.5}
    assert made["fp16"]["initial_scale_power"] == 8


@pytest.mark.parametrize(
    "given",
    [
        "{zero_optimization: {stage: 2}}",
        "{tensor_parallel: {autotp_size: 2}}",
        "{zero_optimization: {compute_grad_norm: false}}",
        "{optimizer: {type: Lamb}}",
        "{scheduler: {type: WarmupLR}}",
        "{torch_autocast: {enabled: true}}",
        "{zero_optimization: {offload_optimizer: {device: cpu}}}",
        "{zero_optimization: {offload_param: {device: cpu}}}",
    ],
)
def test_a_deepspeed_key_that_contradicts_the_recipe_is_refused(given: str) -> None:
    config = load_recipe(GPT, [f"train.deepspeed={given}"]).train
    with refused("deepspeed.own_key", "train.deepspeed"):
        deepspeed_config(config, config.layout(2))


@pytest.mark.parametrize(("num_parameters", "elements"), [(10**5, 2**20), (2**30, 2**24), (10**12, 5 * 10**8)])
def test_buffers_are_a_small_part_of_the_model_unless_the_recipe_sets_them(num_parameters: int, elements: int) -> None:
    given = {"workers": 2, "plan": {"zero_stage": 3}, "deepspeed": {"zero_optimization": {"sub_group_size": 7}}}
    config = TrainConfig.model_validate(given)
    made = with_bounded_buffers(deepspeed_config(config, config.layout(2)), num_parameters)
    zero = made["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["sub_group_size"], zero["stage"]) == (elements, 7, 3)


def test_a_large_model_has_groups_of_parameters_and_all_in_their_order() -> None:
    config = TrainConfig.model_validate({"optimizer": {"name": "sgd", "lr": 0.1}})
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(32)))
    groups = create_optimizer(model, config).param_groups
    matrices = [group["params"] for group in groups if group["weight_decay"]]
    assert len(matrices) == 11, "a part ends once it has a sixteenth of the model, here three matrices"
    assert [id(matrix) for part in matrices for matrix in part] == [id(layer.weight) for layer in model]
    assert len(groups) == 12
    small = create_optimizer(nn.Linear(8, 8), config).param_groups
    assert len(small) == 2
