"""Sentence embeddings: pairs, the contrastive loss over ranks, metrics over batches, and OpenAI's endpoint."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import distributed
from upath import UPath

from app.artifacts import WEIGHTS_FILE
from app.config import load_recipe
from app.data.pairs import PairData, PairDataset, split_pair
from app.data.preparation import held_out
from app.data.sharded import INPUT
from app.errors import DataError, RecipeError
from app.models.factory import blueprint_of
from app.models.pretrained import match_weights
from app.tasks import find_served_task, load_prepared, prepare
from app.tasks.contrastive import Contrastive
from app.tasks.embedding import MeanReciprocalRank, RecallAt1
from app.tasks.objective import objective_of
from app.training.evaluation import evaluate
from tests.helpers import in_fork, result_line
from tests.preparing import first_losses
from tests.pretrained import write_encoder
from tests.wording import refused

RECIPE = {
    "name": "pairs",
    "task": "sentence-embedding",
    "model": {
        "factory": "app.models.embedding:text_embedder",
        "args": {"dimensions": 8, "layers": 1, "width": 8, "heads": 2},
    },
}


def write_pairs(file: Path, rows: int = 40) -> Path:
    lines = [{"anchor": f"what is number {row}", "positive": f"it is the {row}th number"} for row in range(rows)]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


def prepared(tmp_path: Path, *overrides: str, rows: int = 40) -> PairData:
    data = {"source": str(write_pairs(tmp_path / "pairs.jsonl", rows)), "buckets": [16]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE | {"data": data}), encoding="utf-8")
    found = prepare(load_recipe(str(tmp_path / "recipe.yaml"), list(overrides)))
    assert isinstance(found, PairData)
    return found


def pairs_of(split: PairDataset) -> list[tuple[str, str]]:
    return [split_pair(item) for item in split.rows.column(INPUT)]


def test_pairs_are_cleaned_split_without_leaks_and_saved(tmp_path: Path) -> None:
    file = write_pairs(tmp_path / "pairs.jsonl", 30)
    more = [("what is number 0", "zero"), ("what is number 1", "it is the 1th number"), ("", "nothing"), ("a", "a")]
    with file.open("a", encoding="utf-8") as opened:
        opened.write(
            "\n" + "\n".join(json.dumps(dict(zip(("anchor", "positive"), pair, strict=True))) for pair in more)
        )
    config = RECIPE | {"data": {"source": str(file), "buckets": [16], "validation_fraction": 0.3, "test_fraction": 0.2}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(config), encoding="utf-8")
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    data = prepare(recipe)
    assert isinstance(data, PairData)
    assert data.report.dropped == {"duplicate": 2, "empty": 1}
    assert data.rows == {"train": 16, "validation": 9, "test": 6}
    assert data.test is not None
    learned = {text for pair in pairs_of(data.train) for text in pair}
    assert {"what is number 0", "zero"} <= learned
    assert not learned & {*data.validation.texts, *data.test.texts}
    data.save(UPath(tmp_path / "data"))
    again = load_prepared(recipe, UPath(tmp_path / "data"))
    assert again.fingerprint == data.fingerprint
    test: Any = find_served_task(recipe.task).load_test(recipe, UPath(tmp_path / "data"))
    assert test.pairs == data.test.pairs


def write_shared(file: Path, rows: int = 1200) -> list[tuple[str, str]]:
    """Write pairs of which four in five share an anchor with others, and some positives are anchors elsewhere."""
    pairs = [
        (f"what is number {row}" if row % 5 == 0 else f"topic {row % 37}", f"it is the {row}th number of {rows}")
        for row in range(rows)
    ]
    pairs += [(f"it is the {row}th number of {rows}", f"number {row}, again") for row in range(0, rows, 50)]
    lines = [json.dumps({"anchor": anchor, "positive": positive}) for anchor, positive in pairs]
    file.write_text("\n".join(lines), encoding="utf-8")
    return pairs


def test_one_shard_and_many_give_the_same_split_batches_and_losses(tmp_path: Path) -> None:
    pairs, found = write_shared(tmp_path / "shared.jsonl"), []
    for shards in ("{}", "{size: 5KB, memory: 40KB, window: 20KB}"):
        overrides = [f"data.source={tmp_path / 'shared.jsonl'}", f"data.shards={shards}", "data.test_fraction=0.05"]
        data = prepared(tmp_path, *overrides)
        index = data.reference.index
        units = {shard.name.split("-")[1] for split in index.splits.values() for shard in split}
        assert (len(units) > 2, len(index.splits["train"]) > 4) == (shards != "{}",) * 2
        assert data.test is not None
        splits = [pairs_of(data.train), data.validation.pairs, data.test.pairs]
        batches = [data.train.batch(range(first, first + 50)) for first in range(0, 1000, 50)]
        batches.append(data.validation.batch(range(len(data.validation))))
        content = [array.tobytes() for batch in batches for array in (*batch.inputs.values(), batch.targets)]
        recipe = load_recipe(str(tmp_path / "recipe.yaml"), overrides)
        found.append((splits, content, first_losses(recipe, data)))
    assert found[0] == found[1]
    (train, validation, test), *_ = found[0]
    assert sorted([*train, *validation, *test]) == sorted(pairs)
    assert (len(validation), len(test)) == (round(0.1 * len(pairs)), round(0.05 * len(pairs)))
    uses = Counter(text for pair in pairs for text in pair)
    assert {uses[text] for pair in [*validation, *test] for text in pair} == {1}


def test_pairs_with_a_text_of_the_test_source_are_not_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "MAX_HELD_OUT", 6)
    pairs = [(f"what is number {row}", f"it is the {row}th") for row in range(10)]
    pairs += [("what is number 3", "another"), ("last", "it is the 4th")]
    lines = [json.dumps({"anchor": anchor, "positive": positive}) for anchor, positive in pairs]
    (tmp_path / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = prepared(tmp_path, f"data.test_source={tmp_path / 'test.jsonl'}")
    assert data.test is not None
    assert data.rows == {"train": 31, "validation": 3, "test": 6}
    assert data.report.dropped == {"in_test": 6, "untested": 6}
    assert not {*data.test.pairs} - {*pairs[:3], *pairs[5:10]}
    tested = {*data.test.texts}
    assert not tested & {text for pair in [*pairs_of(data.train), *data.validation.pairs] for text in pair}


def test_near_duplicates_are_dropped_and_groups_refused(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(40))
    rows = [{"anchor": f"{words} {row % 30}", "positive": f"{row} is it"} for row in range(3)]
    rows += [{"anchor": f"what is number {row}", "positive": f"it is the {row}th"} for row in range(40)]
    (tmp_path / "near.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    source = f"data.source={tmp_path / 'near.jsonl'}"
    data = prepared(tmp_path, source, "data.clean.near_duplicates=0.7")
    assert data.report.dropped == {"near_duplicate": 2}
    with refused("task.unsupported", "data.group_column"):
        prepared(tmp_path, source, "data.group_column=page")


@pytest.mark.parametrize(
    ("overrides", "rows", "words"),
    [
        ([], 1, "1 pairs, of which 1 have texts that are in no other pair"),
        ([], 2, "leaves the train split empty .2 pairs, 2 kept"),
        (["data.columns.positive=answer"], 9, "data.columns.positive is 'answer', .* it has anchor, positive"),
        (["data.source=builtin:digits"], 9, "no built-in set 'digits' for this task"),
        (["model.args={}"], 9, "model.args.dimensions is None"),
        (
            ["train.plan.tensor=2", "train.workers=2"],
            9,
            "plan.tensor is 2, which task sentence-embedding does not",
        ),
        (
            ["train.label_smoothing=0.1"],
            9,
            "label_smoothing is 0.1, which task sentence-embedding does not",
        ),
    ],
)
def test_what_cannot_be_learned_is_refused(tmp_path: Path, overrides: list[str], rows: int, words: str) -> None:
    with pytest.raises((DataError, RecipeError), match=words):
        prepared(tmp_path, *overrides, rows=rows)


def test_the_validation_is_the_same_however_it_is_shared_out(tmp_path: Path) -> None:
    data = prepared(tmp_path, "data.validation_fraction=0.4")
    vectors = torch.nn.functional.normalize(torch.randn(len(data.validation), 8), dim=-1)
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    objective = objective_of(find_served_task("sentence-embedding"), recipe.train, data)
    expected = vectors[0::2] @ vectors[1::2].T
    ranks = (expected >= expected.diagonal()[:, None]).sum(1)
    parts = [
        objective.sums(vectors[rows], torch.from_numpy(data.validation.batch(rows).targets))
        for rows in ([0, 5, 7], list({*range(32)} - {0, 5, 7}))
    ]
    # A rank without samples computes along on one that does not count.
    parts.append(objective.sums(vectors[:1], torch.full((1, 2), -100)))
    found = objective.values(torch.stack(parts).sum(0))
    assert found["val_recall_at_1"] == pytest.approx(float((ranks == 1).double().mean()))
    assert found["val_mrr"] == pytest.approx(float((1 / ranks).double().mean()))
    own = torch.nn.functional.cross_entropy(expected / recipe.train.temperature, torch.arange(16))
    assert found["val_loss"] == pytest.approx(float(own), rel=1e-5)
    targets = torch.from_numpy(data.validation.batch(range(32)).targets)
    for metric in (RecallAt1(), MeanReciprocalRank()):  # as compile measures them
        assert metric.value(metric.sums(vectors, targets)) == pytest.approx(found[f"val_{metric.name}"])


WEIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(2))
"""Anchors and positives of seven pairs."""
NUMBERS = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 1], [8, 9], [0, 11], [12, 13]])
"""Pairs 0 and 3 have one positive, 0 and 5 one anchor."""


def gradient_of(rows: list[int], ranks: int) -> tuple[float, torch.Tensor]:
    """The share of the loss and its gradient that a rank with these pairs adds to the mean over ranks."""
    weight = WEIGHT.clone().requires_grad_()
    loss = Contrastive(0.1, 0, 4).mean((ROWS[:, rows].flatten(0, 1) @ weight), NUMBERS[rows])
    weighed = loss * len(rows) * ranks / len(NUMBERS)
    weighed.backward()
    assert weight.grad is not None
    return float(weighed.detach()), weight.grad


def as_rank() -> None:
    """Exchange what both ranks add, and print it."""
    distributed.init_process_group("gloo")
    both: list[Any] = [None, None]
    loss, gradient = gradient_of([[0, 2, 4, 6], [1, 3, 5]][distributed.get_rank()], 2)
    distributed.all_gather_object(both, (loss, gradient.tolist()))
    if distributed.get_rank() == 0:
        print(f"RESULT {json.dumps({'both': both})}")
    distributed.destroy_process_group()


def test_two_ranks_have_the_loss_and_gradient_of_one() -> None:
    done = in_fork(f"{__name__}:as_rank", processes=2)
    assert done.returncode == 0, done.stderr
    found = result_line(done.stdout)["both"]
    loss, gradient = gradient_of(list(range(7)), 1)
    assert np.mean([part for part, _ in found]) == pytest.approx(loss, rel=1e-6)
    assert np.allclose(np.mean([part for _, part in found], axis=0), gradient, atol=1e-6)


def test_another_pair_of_the_same_text_is_no_negative() -> None:
    rows = ROWS[:, [0, 3]]
    loss = Contrastive(0.1, 0, 4).mean(rows.flatten(0, 1), NUMBERS[[0, 3]])
    assert float(loss) == 0.0  # neither has a negative


def test_the_report_shows_the_pairs_that_are_hardest_to_find(tmp_path: Path) -> None:
    data = prepared(tmp_path, "data.validation_fraction=0.25")
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    model = blueprint_of(recipe.model, data.facts).model.eval()
    (tmp_path / "weights").mkdir()
    safetensors.torch.save_model(model, str(tmp_path / "weights" / WEIGHTS_FILE))
    found = evaluate(UPath(tmp_path / "weights"), data, recipe)
    assert (found.rows, found.of, found.skipped) == (10, 10, None)
    assert {(sample.text, sample.label) for sample in found.worst} == set(data.validation.pairs)
    losses = [sample.loss for sample in found.worst]
    assert losses == sorted(losses, reverse=True)
    batch = data.validation.batch(range(len(data.validation)))
    loss = Contrastive(recipe.train.temperature, len(data.validation), 8)
    with torch.inference_mode():
        vectors = model(**{name: torch.from_numpy(array) for name, array in batch.inputs.items()})
    assert np.mean(losses) == pytest.approx(loss.value(loss.sums(vectors, torch.from_numpy(batch.targets))), rel=1e-4)
    nearest = [positive for _, positive in data.validation.pairs]
    found_own = [sample.predicted == sample.label for sample in found.worst]
    assert {sample.predicted for sample in found.worst} <= set(nearest)
    assert np.mean(found_own) == pytest.approx(RecallAt1().value(loss.sums(vectors, torch.from_numpy(batch.targets))))


def test_a_pretrained_encoder_is_pooled_and_keeps_its_names(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder")
    data = prepared(tmp_path, "model.factory=null", f"model.pretrained={folder}", "model.args={}")
    recipe = load_recipe(
        str(tmp_path / "recipe.yaml"), ["model.factory=null", f"model.pretrained={folder}", "model.args={}"]
    )
    assert data.facts["dimensions"] == 32
    model = blueprint_of(recipe.model, data.facts).model.eval()
    match = match_weights(model, str(folder))
    assert match.fresh == []
    long, short = data.processor.encode(["good", "the good book"]), data.processor.encode(["good"])
    with torch.inference_mode():
        vectors, alone = (
            model(**{name: torch.from_numpy(array) for name, array in given.items()}) for given in (long, short)
        )
    assert torch.allclose(vectors.norm(dim=1), torch.ones(2))
    assert torch.allclose(vectors[:1], alone, atol=1e-6)


@pytest.mark.parametrize(
    ("pooling", "others", "is_mean"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ["Normalize"], True),
        ({"pooling_mode": "mean"}, [], True),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, ["Normalize"], False),
        ({"pooling_mode": "lasttoken"}, [], False),
        ({"pooling_mode": ["mean", "max"]}, [], False),
        ({"pooling_mode": "mean"}, ["Dense", "Normalize"], False),
    ],
)
def test_a_folder_whose_vectors_are_no_means_is_refused(
    pooling: dict[str, object], others: list[str], is_mean: bool, tmp_path: Path
) -> None:
    folder = write_encoder(tmp_path / "encoder")
    kinds = ["Transformer", "Pooling", *others]
    modules = [
        {"path": f"{index}_{kind}" if index else "", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling), encoding="utf-8")
    overrides = "model.factory=null", f"model.pretrained={folder}", "model.args={}"
    if is_mean:
        assert prepared(tmp_path, *overrides).facts["dimensions"] == 32
        return
    with refused("pretrained.pooling", "model.pretrained"):
        prepared(tmp_path, *overrides)
