"""``train.augment``: samples change at random, and in the same way on any number of workers."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from app.config import AugmentTextConfig, Recipe, load_recipe
from app.data.augmentation import TextAugmentation, augmentation_of, change_image
from app.data.labelled import LabelledDataset
from app.data.prepared import PreparedData
from app.reports.training import training_page
from app.runs import Run
from app.tasks import prepare
from app.telemetry.augmentation import AugmentedSamples
from app.training.activity import Activity
from app.training.data.feed import Feed
from app.training.data.recipe_order import order_of
from app.training.run import open_run, prepare_run
from app.training.worker import Worker
from tests.helpers import ROOT
from tests.wording import refused

IMAGES = "train.augment={image: {crop: 0.6, flip: 0.5, color: 0.4, rand_augment: {}}}"
TEXTS = "train.augment={text: {drop: 0.3, swap: 0.2}}"


def digits(*overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes/digits.yaml", ["train.global_batch_size=64", *overrides])


def pictures(recipe: Recipe, data: PreparedData, workers: int, epoch: int) -> list[bytes]:
    """Return what all ranks read in the first two global batches of an epoch, sorted."""
    read = []
    for rank in range(workers):
        changes = augmentation_of(recipe.train, data)
        layout = recipe.train.layout(workers)
        worker = Worker(rank, workers, torch.device("cpu"))
        with closing(Feed(data, recipe.train, layout, worker, Activity(), order_of(recipe, data), changes)) as feed:
            read += [
                row.numpy().tobytes() for batch in feed.train(epoch, [0, 1]) for row in batch.inputs["pixel_values"]
            ]
    return sorted(read)


def test_each_change_of_an_image_can_be_seen_and_keeps_its_form() -> None:
    image = Image.fromarray(np.arange(48 * 32, dtype=np.uint8).reshape(48, 32)).convert("RGB")
    for keys in ({"crop": 0.3}, {"flip": 0.9999}, {"color": 0.9}, {"rand_augment": {"operations": 3}}):
        config = digits(f"train.augment={{image: {keys}}}".replace("'", "")).train.augment
        assert config
        assert config.image
        changed = [change_image(config.image, image, np.random.default_rng(seed)) for seed in range(8)]
        assert {item.mode for item in changed} == {"RGB"}
        assert sum(np.asarray(item.resize(image.size)).tobytes() != image.tobytes() for item in changed) >= 6, keys


def test_texts_lose_words_but_never_all_and_get_synonyms(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("good, fine, great\n好, 棒\n", encoding="utf-8")
    config = AugmentTextConfig(drop=0.5, swap=0.5, synonyms=str(tmp_path / "words.txt"), synonym_share=0.9)
    change = TextAugmentation(config)
    seen = [change("a good book", np.random.default_rng(seed)) for seed in range(50)]
    assert {word for text in seen for word in text.split()} == {"a", "good", "fine", "great", "book"}
    assert all(seen)
    assert any(text.split().index("book") == 0 for text in seen if "book" in text and " " in text)
    (tmp_path / "words.txt").write_text("он, она\nfast, quick\nfast, rapid\n", encoding="utf-8")
    change = TextAugmentation(config.model_copy(update={"drop": 0.0, "swap": 0.0}))
    seen = [change("слон Fast он", np.random.default_rng(seed)) for seed in range(50)]
    assert {text.split()[0] for text in seen} == {"слон"}
    assert {word for text in seen for word in text.split()[1:]} == {"Fast", "quick", "rapid", "он", "она"}
    (tmp_path / "words.txt").write_text("好, 棒\n", encoding="utf-8")
    chinese = TextAugmentation(config.model_copy(update={"drop": 0.0, "swap": 0.0}))
    assert chinese("这本书很好", np.random.default_rng(0)) == "这本书很棒"
    assert TextAugmentation(AugmentTextConfig())("goods  are good", np.random.default_rng(0)) == "goods are good"


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("İce", "frost"),
        ("İSTANBUL istanbul", "Byzanz Byzanz"),
        ("ſet", "group"),
        ("µ", "micro"),
        ("ς Σ", "sigma sigma"),
    ],
)
def test_a_letter_whose_lower_case_is_another_finds_its_synonyms(text: str, changed: str, tmp_path: Path) -> None:
    lines = ("ice, frost", "İstanbul, Byzanz", "set, group", "μ, micro", "σ, sigma")
    (tmp_path / "words.txt").write_text("\n".join(lines), encoding="utf-8")
    config = AugmentTextConfig(drop=0.0, swap=0.0, synonyms=str(tmp_path / "words.txt"), synonym_share=0.9999)
    assert TextAugmentation(config)(text, np.random.default_rng(0)) == changed


def test_samples_change_alike_on_any_number_of_workers_and_anew_in_each_epoch() -> None:
    recipe, plain = digits(IMAGES), digits()
    data = prepare(recipe)
    alone = pictures(recipe, data, workers=1, epoch=1)
    assert len(alone) == 128
    for workers in (2, 4):
        assert pictures(recipe, data, workers, epoch=1) == alone
    for other in (pictures(recipe, data, 1, epoch=2), pictures(plain, data, 1, epoch=1)):
        assert len(set(alone) & set(other)) < 10
    seeded = digits(IMAGES, "train.seed=1")
    assert pictures(seeded, data, 1, epoch=1) != alone


def test_a_run_shows_samples_before_and_after_and_validates_on_the_samples_as_they_are(tmp_path: Path) -> None:
    run = Run.start("train", digits(IMAGES, f"storage={tmp_path}"))
    plan, data = prepare_run(run)
    open_run(run, plan, data)
    run.until_result.close()
    shown = AugmentedSamples.load(run.folder)
    assert shown
    assert [len(changed) for changed in shown.after] == [3] * 10
    assert all(before not in changed for before, changed in zip(shown.before, shown.after, strict=True))
    page = training_page(run.folder).to_html()
    assert page.count("data:image/png") >= 40
    augmentation = augmentation_of(run.recipe.train, data)
    assert augmentation
    assert isinstance(data.validation, LabelledDataset)
    config = run.recipe.train
    with closing(
        Feed(data, config, config.layout(1), Worker(0, 1, torch.device("cpu")), Activity(), order_of(run.recipe, data))
    ) as feed:
        batch = next(feed.validation())
    first = data.validation.batch([0]).inputs["pixel_values"][0]
    assert any(np.array_equal(row, first) for row in batch.inputs["pixel_values"].numpy())


@pytest.mark.parametrize("overrides", [[TEXTS], ["train.augment={text: {drop: 0.1}, image: {flip: 0.5}}"]])
def test_changes_that_do_not_fit_the_data_are_refused(overrides: list[str]) -> None:
    with refused("task.unsupported", "train.augment.text"):
        prepare_run(Run.start("train", digits(*overrides)))


def test_augment_and_a_teacher_exclude_each_other() -> None:
    with refused("keys.contradict", "train.teacher"):
        digits(IMAGES, "train.teacher={model: digits/1}")


def test_synonyms_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with refused("file.unreadable", "train.augment.text.synonyms"):
        TextAugmentation(AugmentTextConfig(synonyms="nowhere.txt"))
    (tmp_path / "words.txt").write_text("good, fine\nalone\n", encoding="utf-8")
    with refused("synonyms.one_word", "train.augment.text.synonyms"):
        TextAugmentation(AugmentTextConfig(synonyms=str(tmp_path / "words.txt")))
