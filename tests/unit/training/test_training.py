"""The parts of training that need no process group."""

import copy
import time
from collections.abc import Iterator
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from app.config import EarlyStoppingConfig, ModelConfig, ScheduleConfig, TrainConfig, load_recipe
from app.config.metrics import Selection
from app.models.factory import build_model, logits_of
from app.runs import CONFIG_FILE, Run
from app.tasks import find_task
from app.training.data.ranks import DataRank, validation_share
from app.training.data.recipe_order import count_steps, order_of
from app.training.engine.batch_norm import synchronize_batch_norm
from app.training.engine.deepspeed_engine import Factors, StepResult
from app.training.engine.engine import keep_frozen_in_eval
from app.training.engine.optimizer import lr_factor
from app.training.records import EpochRecord, best_of, ranked, should_stop
from app.training.resume import start_or_resume
from app.training.worker import collective_timeout, seed_random
from tests.helpers import ROOT
from tests.orders import batches_of, in_memory
from tests.wording import refused

LENGTHS = [(index * 37) % 101 for index in range(1000)]


def test_no_length_is_left_out_more_than_others() -> None:
    """The last batch of 1,050 samples is not full. If they were sorted first, every epoch would drop the longest."""
    lengths = np.arange(1050)
    order = in_memory(lengths, 100)
    kept = [{row for batch in batches_of(order, epoch) for row in batch.tolist()} for epoch in range(1, 9)]
    assert all(len(epoch) == 1000 for epoch in kept)
    assert set.union(*kept) == set(range(1050))


def test_an_epoch_of_a_million_samples_is_cut_in_a_second() -> None:
    lengths = np.arange(1_000_000) % 512
    began = time.process_time()
    assert np.shape(batches_of(in_memory(lengths, 64, seed=-1), 1)) == (15_625, 64)
    assert time.process_time() - began < 2.0


def test_batches_are_of_similar_length() -> None:
    spans = [
        max(LENGTHS[index] for index in batch) - min(LENGTHS[index] for index in batch)
        for batch in batches_of(in_memory(LENGTHS, 32), 1)
    ]
    assert sum(spans) / len(spans) < 10


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_sees_each_sample_once(world_size: int) -> None:
    split: Any = SimpleNamespace(lengths=LENGTHS, shards=None, groups=None)
    for rows in (np.arange(1000), np.arange(0, 1000, 3)):
        ranks = [DataRank(rank, world_size) for rank in range(world_size)]
        shares = [[batch for batch, _ in validation_share(split, rank, 7, rows)] for rank in ranks]
        assert len({len(share) for share in shares}) == 1
        assert sorted(np.concatenate([batch for share in shares for batch in share])) == rows.tolist()


def epoch_record(epoch: int, **values: Any) -> EpochRecord:
    return EpochRecord(
        **{"epoch": epoch, "step": 1, "train_loss": 1.0, "val_loss": 1.0, "samples_per_s": 1.0, **values}
    )


@pytest.mark.parametrize(
    ("values", "patience", "min_delta", "expected"),
    [
        ([3.0, 2.0, 1.0], 3, 0.0, False),  # nothing before the last three
        ([3.0, 2.0, 1.0, 0.9], 3, 0.0, False),
        ([1.0, 1.1, 1.2, 1.3], 3, 0.0, True),
        ([1.0, 1.0, 1.0], 2, 0.0, True),  # equal is no better
        ([1.0, 0.95, 0.94], 2, 0.1, True),  # better, but by less than min_delta
        ([1.0, 0.8, 1.2], 2, 0.1, False),
        ([1.0, 0.5, 0.75], 2, 0.5, False),  # better by just min_delta
        ([1.0, 2.0, 0.5, 2.0], 2, 0.0, False),
        ([nan, 1.0, 2.0, 2.0], 2, 0.0, True),  # no number is worse than any
        ([nan, 2.0, 1.0], 2, 0.5, False),
        ([1.0, nan, nan], 2, 0.0, True),
        ([nan, nan, nan], 2, 0.0, True),
    ],
)
def test_early_stopping_by_hand(values: list[float], patience: int, min_delta: float, expected: bool) -> None:
    config = EarlyStoppingConfig(patience=patience, min_delta=min_delta)
    costs, scores = (
        [epoch_record(epoch, val_score=sign * value) for epoch, value in enumerate(values)] for sign in (1, -1)
    )
    assert should_stop(costs, Selection("val_score", "min"), config) is expected
    assert should_stop(scores, Selection("val_score", "max"), config) is expected


def test_an_epoch_is_compared_with_those_that_were_validated_on_the_same_sources() -> None:
    losses = [("a", 0.1), ("a", 0.2), ("ab", 0.5), ("ab", 0.4), ("ab", 0.45)]
    records = [
        epoch_record(epoch, val_loss=loss, source_samples=dict.fromkeys(sources, 9))
        for epoch, (sources, loss) in enumerate(losses, start=1)
    ]
    selection = Selection("val_loss", "min")
    assert [record.epoch for record in ranked(records, selection)] == [4, 5, 3, 1, 2]
    stops = [should_stop(records[:num], selection, EarlyStoppingConfig(patience=1)) for num in (2, 3, 4, 5)]
    assert stops == [True, False, False, True]
    broken = epoch_record(3, val_loss=nan, source_samples={"a": 9, "b": 9})
    assert best_of([*records[:2], broken], selection).epoch == 1


@pytest.mark.parametrize("metric", ["val_loss", "val_accuracy"])
@pytest.mark.parametrize(("values", "best"), [([nan, 0.5, 0.5], 1), ([0.5, nan], 0), ([nan, nan], 0)])
def test_the_best_epoch_is_the_first_of_equals_and_has_a_number(metric: str, values: list[float], best: int) -> None:
    selection = Selection(metric, "max" if metric == "val_accuracy" else "min")
    records = [epoch_record(epoch, **{"val_accuracy": 0.1, metric: value}) for epoch, value in enumerate(values)]
    assert best_of(records, selection).epoch == best


@pytest.mark.parametrize("given", [{}, {"early_stopping": None}, {"early_stopping": {"patience": 1}}])
def test_the_metric_of_the_task_chooses_the_best_epoch_and_the_loss_among_equals(given: dict[str, object]) -> None:
    values = [(0.6667, 1.3), (0.4167, 0.9), (0.6667, 1.1), (0.6667, nan)]
    records = [
        epoch_record(epoch, val_accuracy=accuracy, val_loss=loss)
        for epoch, (accuracy, loss) in enumerate(values, start=1)
    ]
    config = TrainConfig.model_validate(given)
    assert best_of(records, find_task("image-classification").selection(config)).epoch == 3
    errors = find_task("tabular-regression").selection(config)
    assert (errors.metric, errors.mode) == ("val_mae", "min")


def frozen(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules).requires_grad_(False).eval()


def layers() -> Iterator[nn.Module]:
    yield from (nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4))


def test_modules_that_the_factory_froze_in_evaluation_mode_stay_in_it() -> None:
    trained, thawed = nn.Sequential(*layers()).eval(), nn.Sequential(frozen(*layers()), *layers()).eval()
    adapted = nn.Sequential(nn.Sequential(*layers()).requires_grad_(False), nn.Linear(4, 4))
    kept, nested = frozen(*layers()), nn.Sequential(frozen(*layers()))
    model = nn.Sequential(trained, thawed, adapted, kept, nested, nn.Dropout().eval())
    keep_frozen_in_eval(model)
    for network in (model, copy.deepcopy(model)):
        for mode in (False, True):
            network.train(mode)
        held = {name for name, module in network.named_modules() if not module.training}
        assert held == {"3", "3.0", "3.1", "3.2", "4.0", "4.0.0", "4.0.1", "4.0.2"}
    stage = nn.Sequential(*kept).train()  # of a pipeline
    assert not any(layer.training for layer in stage)
    root = frozen(*layers())
    keep_frozen_in_eval(root)
    assert all(module.training for module in root.train().modules())


@pytest.mark.parametrize(
    ("loss_scale", "grad_norm", "is_applied", "is_broken"),
    [
        (None, 1.0, True, False),
        (None, None, True, False),  # nobody took the norm
        (None, nan, True, True),
        (None, inf, False, True),
        (2.0, inf, False, False),  # the loss scale falls
        (1.0, inf, False, True),  # and can fall no more
        (1.0, 1.0, True, False),
    ],
)
def test_a_gradient_that_overflows_is_broken_once_the_loss_scale_cannot_fall(
    loss_scale: float | None, grad_norm: float | None, is_applied: bool, is_broken: bool
) -> None:
    assert StepResult(torch.tensor(1.0), Factors(0.1, loss_scale), grad_norm, is_applied).is_broken is is_broken


def test_a_step_in_fp16_tells_the_scale_that_deepspeed_uses_and_not_the_configurations() -> None:
    scaler = SimpleNamespace(cur_scale=2.0**15)
    for optimizer in (SimpleNamespace(loss_scaler=scaler), SimpleNamespace(loss_scale_config=scaler)):
        engine = SimpleNamespace(
            optimizer=optimizer, fp16_enabled=lambda: True, get_lr=lambda: [0.1], loss_scale=lambda: 0
        )
        assert Factors.of(engine) == Factors(0.1, 2.0**15)


def test_schedules_by_hand() -> None:
    cosine = ScheduleConfig(name="cosine", warmup_fraction=0.2)
    assert [round(lr_factor(step, 10, cosine), 4) for step in (0, 1, 2, 6, 10)] == [0.3333, 0.6667, 1.0, 0.5, 0.0]
    linear = ScheduleConfig(name="linear", warmup_fraction=0.0)
    assert [lr_factor(step, 4, linear) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert lr_factor(9, 10, ScheduleConfig(name="constant", warmup_fraction=0.0)) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tracks", [True, False])
def test_batch_norm_over_workers_validates_with_float32_statistics(dtype: torch.dtype, tracks: bool) -> None:
    """DeepSpeed keeps buffers in float32 beside weights in bf16."""
    plain = nn.BatchNorm2d(4, track_running_stats=tracks).eval()
    features = torch.randn(2, 4, 3, 3).to(dtype)
    nn.init.uniform_(plain.weight)
    if plain.running_mean is not None:
        nn.init.normal_(plain.running_mean)
    expected = plain(features.float())
    synchronized = synchronize_batch_norm(plain)
    for parameter in synchronized.parameters():
        parameter.data = parameter.data.to(dtype)
    normal = synchronized(features)
    assert normal.dtype == dtype
    torch.testing.assert_close(normal.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("_process_group")
def test_batch_norm_over_workers_refuses_one_value_of_each_channel() -> None:
    """Its variance is 0 / 0, which would stay in the running statistics for ever."""
    norm = synchronize_batch_norm(nn.BatchNorm1d(4))
    with refused("batch_norm.one_value"):
        norm(torch.randn(1, 4))
    assert norm(torch.randn(2, 4)).isfinite().all()
    assert norm.running_var.isfinite().all()


def test_too_few_samples_for_a_batch_are_refused() -> None:
    recipe = load_recipe(ROOT / "recipes/digits.yaml")
    assert count_steps(recipe, in_memory([0] * 200, 64)) == 3 * recipe.train.epochs
    few: Any = SimpleNamespace(train=[0] * 10)
    with refused("batch.too_large", "train.global_batch_size"):
        order_of(recipe, few)


@pytest.mark.parametrize(
    ("factory", "args", "rule", "key"),
    [
        ("app.models.nothing:small_cnn", {}, "import.fails", None),
        ("app.models.image:small_cn", {}, "import.fails", None),
        ("app.models.image:small_cnn", {"widht": 8}, "recipe.extra_forbidden", "model.args"),
        ("app.models.image:small_cnn", {"width": 9}, "model.args_refused", "model.args"),
        ("app.models.image:small_cnn", {"poolings": 0}, "model.args_refused", "model.args"),
        ("app.models.image:small_cnn", {"width": -8}, "model.args_refused", "model.args"),
        ("app.models.text:encoder_classifier", {}, "recipe.missing", "model.args.vocab_size"),
        ("app.artifacts:DATA", {}, "factory.no_function", "model.factory"),
        ("app.training.data.ranks:DataRank", {"rank": 0, "size": 1}, "factory.no_module", "model.factory"),
    ],
)
def test_models_that_cannot_be_built_are_refused(
    factory: str, args: dict[str, int], rule: str, key: str | None
) -> None:
    facts = {"num_labels": 10, "channels": 3, "image_size": 32}
    with refused(rule, key):
        build_model(ModelConfig(factory=factory, args=args), facts)


def test_resnet50_has_its_size_and_answers_logits() -> None:
    model = build_model(ModelConfig(factory="app.models.image:resnet50"), {"num_labels": 1000, "channels": 3}).eval()
    assert (
        sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    )  # of the paper's network, as in torchvision
    assert logits_of(model(pixel_values=torch.zeros(2, 3, 64, 64))).shape == (2, 1000)


def test_each_pooling_halves_the_picture_and_adds_a_convolution_twice_as_wide() -> None:
    facts = {"num_labels": 10, "channels": 1, "image_size": 28}
    for poolings, size in ((1, 14), (2, 7), (3, 3)):
        config = ModelConfig(factory="app.models.image:small_cnn", args={"width": 8, "poolings": poolings})
        model = build_model(config, facts)
        pixels = torch.zeros(2, 1, 28, 28)
        assert model(pixels).shape == (2, 10)
        assert model.features[:-2](pixels).shape == (2, 8 * 2 ** (poolings + 1), size, size)


def test_the_latest_run_is_found_whatever_other_runs_left() -> None:
    recipe = load_recipe("recipes/digits.yaml", ["train.resume=latest"])
    earlier = Run.start("train", recipe)
    earlier.open()
    for other in ("99991231-000000-another-recipe-ab12", "99991231-000000-digits-of-another-ab12", "digits", "tmp"):
        (earlier.folder.parent / other).mkdir()
        (earlier.folder.parent / other / CONFIG_FILE).write_text("no: recipe", encoding="utf-8")
    assert start_or_resume("train", recipe).run_id == earlier.run_id
    (earlier.folder / CONFIG_FILE).write_text("name: digits\nolder: 1\n", encoding="utf-8")
    with refused("run.unreadable"):
        start_or_resume("train", recipe)


def test_ranks_after_the_largest_seed_begin_again_at_zero() -> None:
    drawn = []
    for seed in (2**64, 0):
        seed_random(seed)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]


def test_a_timeout_that_torch_cannot_count_is_refused() -> None:
    assert collective_timeout(TrainConfig(hang_timeout_s=365 * 86_400.0)).days == 365
    with pytest.raises(ValidationError):
        TrainConfig(hang_timeout_s=1e12)
