"""``train.augment.mix`` and ``train.augment.audio``: encoded samples are masked and mixed alike on any world."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from app.config import AugmentAudioConfig, MixConfig, Recipe, load_recipe
from app.data.augmentation import augmentation_of
from app.data.prepared import Batch, PreparedData
from app.data.tensor_augmentation import Mask, Mix
from app.data.text import TextProcessor
from app.reports.training import training_page
from app.runs import Run
from app.tasks import prepare
from app.tasks.classification import Classification
from app.tasks.objective import CrossEntropy
from app.telemetry.augmentation import AugmentedSamples
from app.tensors import TensorSpec
from app.training.activity import Activity
from app.training.data.feed import Feed
from app.training.data.ranks import partners_of
from app.training.data.recipe_order import order_of
from app.training.run import open_run, prepare_run
from app.training.worker import Worker
from tests.helpers import ROOT
from tests.wording import refused

MIX = "train.augment={mix: {mixup: 0.4, cutmix: 1.0, share: 0.9}}"
MASKS = "train.augment={audio: {time_mask: 0.5, frequency_mask: 0.4, masks: 1}}"
IMAGES = (TensorSpec("pixel_values", np.dtype(np.float32), (-1, 1, 8, 8)),)


def digits(*overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes/digits.yaml", ["train.global_batch_size=64", *overrides])


def read(recipe: Recipe, data: PreparedData, workers: int, epoch: int = 1, first: int = 0) -> list[bytes]:
    """Return what all ranks read in global batches of an epoch, each sample with its target, sorted."""
    samples = []
    for rank in range(workers):
        changes = augmentation_of(recipe.train, data)
        layout, worker = recipe.train.layout(workers), Worker(rank, workers, torch.device("cpu"))
        with closing(Feed(data, recipe.train, layout, worker, Activity(), order_of(recipe, data), changes)) as feed:
            for batch in feed.train(epoch, range(first, 3)):
                pixels = batch.inputs["pixel_values"].numpy()
                samples += [
                    image.tobytes() + target.tobytes()
                    for image, target in zip(pixels, batch.targets.numpy(), strict=True)
                ]
    return sorted(samples)


def batch_of(num: int = 16) -> Batch:
    """A batch of images, each of one value of its own, in two classes."""
    values = np.arange(num, dtype=np.float32)
    return Batch({"pixel_values": np.tile(values[:, None, None, None], (1, 1, 8, 8))}, np.arange(num) % 2)


def mixed(**config: float) -> tuple[Batch, np.ndarray]:
    """Return the mixed batch, and the share that each image keeps of itself by its pixels."""
    given = batch_of()
    mix = Mix.of(MixConfig.model_validate(config), IMAGES, 2)
    places, partners = list(range(16)), partners_of(np.arange(16), 2).tolist()
    found = mix(given, places, partners, [np.random.default_rng(row) for row in places])
    assert np.array_equal(given.inputs["pixel_values"], batch_of().inputs["pixel_values"])
    means = found.inputs["pixel_values"].mean((1, 2, 3))
    return found, (means - np.array(partners)) / (np.array(places) - np.array(partners))


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_a_mixed_sample_has_both_labels_by_the_shares_of_its_pixels(kind: str) -> None:
    found, kept = mixed(**{kind: 1.0})
    own = np.arange(16) % 2
    assert np.allclose(found.targets[np.arange(16), own], kept, atol=1e-6)
    assert np.allclose(found.targets.sum(1), 1.0)
    assert len(set(kept.round(3).tolist())) > 10
    kinds = {len(np.unique(image)) for image in found.inputs["pixel_values"]}
    assert kinds <= ({1} if kind == "mixup" else {1, 2})


def test_the_share_says_how_many_are_mixed_and_both_kinds_take_turns() -> None:
    _, kept = mixed(mixup=1.0, share=0.0)
    assert np.array_equal(kept, np.ones(16))
    found, kept = mixed(mixup=1.0, cutmix=1.0)
    colors = [
        len(np.unique(image)) for image, share in zip(found.inputs["pixel_values"], kept, strict=True) if share < 1
    ]
    assert {1, 2} == set(colors)


def test_partners_are_others_of_the_same_batch() -> None:
    for size, block in ((64, 64), (192, 64), (7, 2), (100, 64)):
        batch = np.random.default_rng(size).permutation(1000)[:size]
        partners = partners_of(batch, block)
        assert sorted(partners) == sorted(batch)
        assert not (partners == batch).any()
    assert partners_of(np.array([5]), 64).tolist() == [5]


@pytest.mark.parametrize("change", [MIX, MASKS])
def test_samples_are_mixed_and_masked_alike_on_any_number_of_workers_and_after_a_resume(change: str) -> None:
    recipe = digits(change, "data.shards={size: 20KB, window: 40KB}")
    data = prepare(recipe)
    alone = read(recipe, data, workers=1)
    assert len(set(alone)) == 192
    for workers in (2, 4, 64):
        assert read(recipe, data, workers) == alone
    small = digits(change, "train.plan={micro_batch: 8}")
    assert read(small, data, 2) == alone
    assert set(read(recipe, data, 2, first=1)) < set(alone)
    assert len(set(read(recipe, data, 1, epoch=2)) & set(alone)) < 10


def test_the_loss_of_shares_is_the_mean_of_the_labels_losses() -> None:
    torch.manual_seed(0)
    logits, one, other = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([1, 1, 0, 2, 2, 0])
    kept = torch.rand(6)
    shares = kept[:, None] * functional.one_hot(one, 3) + (1 - kept)[:, None] * functional.one_hot(other, 3)
    for weights in (None, (0.5, 1.0, 1.5)):
        loss = CrossEntropy(0.1, weights=weights)
        expected = [
            kept[row] * loss.mean(logits[row : row + 1], one[row : row + 1])
            + (1 - kept[row]) * loss.mean(logits[row : row + 1], other[row : row + 1])
            for row in range(6)
        ]
        assert torch.allclose(loss.mean(logits, shares), torch.stack(expected).mean())


def test_masks_cover_frames_and_bins_in_a_row_with_the_mean() -> None:
    given = {"mel": np.random.default_rng(0).random((20, 40, 100), np.float32), "length": np.ones((20, 1), np.float32)}
    specs = [TensorSpec(name, np.dtype(np.float32), (-1, *values.shape[1:])) for name, values in given.items()]
    mask = Mask.of(AugmentAudioConfig(time_mask=0.3, frequency_mask=0.25, masks=1), specs)
    found = mask(given, [np.random.default_rng(row) for row in range(20)])
    assert np.array_equal(found["length"], given["length"])
    changed = found["mel"] != given["mel"]
    frames, bins = changed.all(1), changed.all(2)
    assert (frames.sum(1) <= 30).all()
    assert (bins.sum(1) <= 10).all()
    assert len(set(frames.sum(1).tolist())) > 5
    # What is masked is a whole row or column, and each kind is one stretch.
    assert not (changed & ~frames[:, None, :] & ~bins[:, :, None]).any()
    assert (np.abs(np.diff(frames.astype(int), axis=1)).sum(1) <= 2).all()
    assert np.allclose(
        found["mel"][changed], np.broadcast_to(given["mel"].mean((1, 2), keepdims=True), changed.shape)[changed]
    )


def test_a_runs_page_shows_mixed_samples_with_their_labels(tmp_path: Path) -> None:
    run = Run.start("train", digits(MIX, f"storage={tmp_path}"))
    plan, data = prepare_run(run)
    open_run(run, plan, data)
    run.until_result.close()
    shown = AugmentedSamples.load(run.folder)
    assert shown
    captions = [form.caption for forms in shown.after for form in forms]
    assert len(captions) == 30
    assert sum("%" in caption and ", " in caption for caption in captions) > 10
    page = training_page(run.folder).to_html()
    assert next(caption for caption in captions if caption) in page
    # Columns of pictures are narrow, so that all fit on a screen.
    table = page.partition('aria-label="Augmentation"')[2].partition("</table>")[0]
    assert 'class="long"' not in table
    assert augmentation_of(run.recipe.train, data)


class Changed(Classification):
    processor = TextProcessor


@pytest.mark.parametrize(
    ("recipe", "changes", "key"),
    [
        ("reviews", "{mix: {mixup: 0.2}}", "train.augment.mix"),
        ("reviews", "{audio: {time_mask: 0.2}}", "train.augment.audio"),
        ("breast_cancer", "{mix: {cutmix: 1.0}}", "train.augment.mix.cutmix"),
    ],
)
def test_inputs_that_cannot_be_masked_or_mixed_are_refused(recipe: str, changes: str, key: str, tmp_path: Path) -> None:
    keys = [f"train.augment={changes}"]
    if recipe == "reviews":
        rows = "".join(f"a text with the number {number},{number % 2}\n" for number in range(40))
        (tmp_path / "texts.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
        keys += [f"data.source={tmp_path / 'texts.csv'}", f"task={__name__}:Changed", "train.linear_baseline=false"]
    given = load_recipe(ROOT / f"recipes/{recipe}.yaml", keys)
    with refused("augment.inputs", key):
        augmentation_of(given.train, prepare(given))


def test_targets_that_are_no_classes_are_not_mixed() -> None:
    with refused("task.unsupported", "train.augment.mix"):
        load_recipe(ROOT / "recipes/diabetes.yaml", ["train.augment={mix: {mixup: 0.2}}"])
    with refused("mix.empty", "train.augment.mix"):
        digits("train.augment={mix: {share: 0.5}}")
