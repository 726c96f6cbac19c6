"""The recipe: what is read, what is refused, and in which words."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import yaml

from app.config import Recipe, dump_recipe, load_recipe, parse_stored_recipe, parse_yaml, with_values
from app.errors import RecipeError
from tests.helpers import ROOT, run

DIGITS, REVIEWS, STDLIB = (ROOT / f"recipes/{name}.yaml" for name in ("digits", "reviews", "stdlib_gpt"))


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*.yaml")), ids=lambda path: path.stem)
def test_recipes_load_and_fit_the_schema(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), Recipe.model_json_schema())
    assert load_recipe(path).name == path.stem


def test_what_show_prints_is_the_same_recipe(tmp_path: Path) -> None:
    shown = run("rayloom", "recipe", "show", str(DIGITS), "train.epochs=7")
    (tmp_path / "shown.yaml").write_text(shown.stdout, encoding="utf-8")
    assert load_recipe(tmp_path / "shown.yaml") == load_recipe(DIGITS, ["train.epochs=7"])


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("train.optimizer.lr=1e-3", lambda recipe: recipe.train.optimizer.lr == 0.001),
        ("data.buckets=[8, 16]", lambda recipe: recipe.data.buckets == [8, 16]),
        ("data.buckets.0=8", lambda recipe: recipe.data.buckets[:2] == [8, 32]),
        ("train.plan.zero_stage=2", lambda recipe: recipe.train.plan.zero_stage == 2),
        ("train.early_stopping=null", lambda recipe: recipe.train.early_stopping is None),
        ("train.profile.active=2", lambda recipe: (recipe.train.profile.wait, recipe.train.profile.active) == (5, 2)),
        ("model.args.width=64", lambda recipe: recipe.model.args["width"] == 64),
        ("serve.replicas=[1, 4]", lambda recipe: recipe.serve.replica_range == (1, 4)),
        (
            "serve.batching={max_batch_size: 32, preferred_batch_sizes: [8, 16, 32], timeout_us: 2000}",
            lambda recipe: recipe.serve.batching.preferred_batch_sizes == [8, 16, 32],
        ),
        ("serve.tensor_parallel={size: 2}", lambda recipe: recipe.serve.tensor_parallel.cpus_per_process == 1.0),
        ("serve.replicas=2", lambda recipe: recipe.serve.replica_range == (2, 2)),
    ],
)
def test_overrides_set_one_value(override: str, read: Callable[[Recipe], bool]) -> None:
    assert read(load_recipe(REVIEWS, [override]))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.optimzer.lr=1", ["train.optimzer", "'optimizer'"]),
        ("epochs=3", ["epochs", "'train.epochs'"]),
        ("train.Epochs=3", ["unknown key train.Epochs", "'epochs'"]),
        ("alerts.0.metrc=x", ["unknown key alerts.0.metrc", "'metric'"]),
        ("compile.sparsity=2:4", ["compile.sparsity is '2:4'", "'none' or '2-of-4'"]),
        ("train.prune={weights: /w, pattern: '2:4'}", ["train.prune.pattern is '2:4'", "'2-of-4'"]),
        ("data.seed=18446744073709551616", ["data.seed is 18446744073709551616", "less than"]),
        ("train.epochs=three", ["train.epochs", "'three'", "integer"]),
        ("train.epochs=true", ["train.epochs", "True", "integer"]),
        ("train.optimizer.lr=0", ["train.optimizer.lr", "greater than 0"]),
        ("train.plan.zero_stage=7", ["train.plan.zero_stage", "0, 1, 2 or 3"]),
        ("train.workers=3", ["global_batch_size 64", "3 data-parallel ranks", "multiple of 3, such as 66"]),
        ("train.workers=[5, 7]", ["global_batch_size 64", "multiple of 7, such as 70"]),
        ("train.workers=[4, 1]", ["train.workers", "[min, max]"]),
        ("train.profile={wait: -1}", ["train.profile.wait", "-1"]),
        ("train.plan.micro_batch=5", ["micro_batch 5", "32 samples each"]),
        ("model.factory=small_cnn", ["model.factory", "package.module:name"]),
        ("data.buckets=[64, 32]", ["data.buckets", "ascend"]),
        ("data.buckets.9=1", ["'9'", "index"]),
        ("train.early_stopping.mode=min", ["val_accuracy", "max"]),
        (
            "train.early_stopping={metric: val_perplexity}",
            ["early_stopping.metric is val_perplexity", "val_loss, val_accuracy: name one"],
        ),
        ("data.block_length=64", ["data.block_length", "64", "does not support"]),
        ("data.tokenizer={kind: bytes}", ["data.tokenizer.kind", "does not support"]),
        ("task=image-clasification", ["language-modeling", "import string"]),
        ("train.epochs", ["'train.epochs'", "key=value"]),
        ("serve.canary={percent: 0}", ["serve.canary.percent", "0", "greater than 0"]),
        ("serve.shadow={percent: 101}", ["serve.shadow.percent", "101", "less than or equal to 100"]),
        ("serve.canary={version: 2}", ["serve.canary.percent is missing"]),
        ("serve={version: 2, canary: {percent: 9, version: 2}}", ["serve", "version and canary.version are both 2"]),
        ("serve.replicas=[4, 1]", ["serve.replicas", "[min, max]", "[4, 1]"]),
        ("compile.resources={GPU: 1}", ["compile.resources", "GPU is not a custom resource"]),
        ("serve.resources={rack: 0}", ["serve.resources.rack", "greater than 0"]),
        ("serve.replicas=0", ["serve.replicas", "[min, max]", "0"]),
        ("serve={replicas: 2, scaling: {latency_target_ms: 50}}", ["scaling.latency_target_ms is 50", "[min, max]"]),
        ("serve.token_file=token", ["serve.token_file", "'token'", "absolute"]),
        ("serve={auth: none, token_file: /token}", ["token_file", "auth is none"]),
        ("serve.tls={certificate: /c.pem}", ["serve.tls.key"]),
    ],
)
def test_what_cannot_work_is_refused_with_key_value_and_way_out(override: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(REVIEWS, [override])
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.buckets=[8, 16]", ["data.buckets", "[8, 16]", "language-modeling does not support"]),
        ("train.linear_baseline=true", ["train.linear_baseline", "does not support"]),
        ("data.test_fraction=0.1", ["data.test_fraction", "does not support"]),
        ("data.tokenizer={kind: bytes, vocab_size: 512}", ["data.tokenizer", "leave vocab_size"]),
        ("data.tokenizer.vocab_size=256", ["256", "257 or more"]),
    ],
)
def test_keys_that_language_modelling_does_not_take_are_refused(override: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(STDLIB, [override])
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    ("content", "word"), [("name: [", "not YAML"), ("- a", "expected keys"), ("name: x", "data is missing")]
)
def test_broken_files_are_refused(tmp_path: Path, content: str, word: str) -> None:
    (tmp_path / "broken.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(RecipeError, match=word):
        load_recipe(tmp_path / "broken.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10), ("0o10", 8), ("0x1F", 31), ("1e3", 1000.0), ("2e-1", 0.2), (".5", 0.5), ("+1", 1),
        ("1:30", "1:30"), ("1_000", "1_000"), ("0b11", "0b11"), ("yes", "yes"), ("NO", "NO"),
        ("2026-01-02", "2026-01-02"),
        ("True", True), ("~", None), ("'1e3'", "1e3"),
    ],
)  # fmt: skip
def test_words_are_read_by_yaml_1_2_and_written_so_that_they_are_read_again(text: str, value: object) -> None:
    recipe = load_recipe(REVIEWS, [f"model.args.given={text}"])
    assert repr(recipe.model.args["given"]) == repr(value)
    assert parse_stored_recipe(parse_yaml(dump_recipe(recipe))) == recipe


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {}\ndata: {}\ntrain: {}\n", ["line 3, column 1: key 'train' is given twice", "on line 1"]),
        ("train: {epochs: 1, 'epochs': 2}", ["line 1, column 20: key 'epochs' is given twice"]),
        ("model: {args: {1: a, 0x1: b}}", ["key 1 is given twice"]),
        ("model: {args: {lr: .inf}}", ["line 1, column 20: this is not a finite number"]),
        ("model: {args: {lr: -.INF}}", ["not a finite number"]),
        ("model: {args: {lr: [.nan]}}", ["not a finite number"]),
        ("model: {args: {lr: 1e999}}", ["not a finite number"]),
        ("model: {args: {lr: !!int 1_0}}", ["not a whole number"]),
        ("model: {args: {lr: !!timestamp x}}", ["could not determine a constructor"]),
        ("[" * 5000, ["nested too deeply"]),
    ],
)  # fmt: skip
def test_what_yaml_could_say_in_two_ways_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "odd.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as refused:
        load_recipe(tmp_path / "odd.yaml")
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_an_anchor_is_merged_and_the_own_key_wins(tmp_path: Path) -> None:
    content = REVIEWS.read_text(encoding="utf-8") + "\nnotify: {}\n"
    given = tmp_path / "merged.yaml"
    given.write_text(content + "tracking: {wandb: null, <<: {wandb: null}}\n", encoding="utf-8")
    assert load_recipe(given).tracking.wandb is None


@pytest.mark.parametrize("override", ["train.optimizer.lr=.inf", "train.optimizer={lr: 0.1, lr: 0.2}"])
def test_an_override_is_read_by_the_same_rules(override: str) -> None:
    with pytest.raises(RecipeError, match=r"not a YAML value \(line 1, column"):
        load_recipe(REVIEWS, [override])


def test_a_number_that_is_computed_is_finite_too() -> None:
    with pytest.raises(RecipeError, match=r"train.optimizer.lr is inf: expected a finite number"):
        with_values(load_recipe(REVIEWS), {"train.optimizer.lr": math.inf})


def test_a_plan_that_is_no_yaml_is_refused_by_its_key() -> None:
    with pytest.raises(RecipeError, match=r"train.plan: expected auto, or keys such as zero_stage, got '{zero_stage"):
        load_recipe(REVIEWS, ["train.plan='{zero_stage: 1'"])


def test_a_missing_file_is_refused() -> None:
    refused = run("rayloom", "recipe", "show", "recipes/nothing.yaml")
    assert refused.returncode == 2
    assert "recipes/nothing.yaml" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(DIGITS, ["train.epochs=0", "serve.port=0"])
    assert len(str(refused.value).splitlines()) == 2


def test_the_batch_is_divided() -> None:
    train = load_recipe(DIGITS, ["train.global_batch_size=96", "train.plan.micro_batch=16"]).train
    layout = train.layout(2)
    assert (layout.data, layout.micro_batch, layout.gradient_accumulation) == (2, 16, 3)


def test_the_schema_is_printed() -> None:
    assert json.loads(run("rayloom", "recipe", "schema").stdout) == json.loads(json.dumps(Recipe.model_json_schema()))


@pytest.mark.parametrize(
    ("module", "later"),
    [
        ("app.config", {"ray", "torch", "deepspeed", "pandas"}),
        ("app.training.__main__", {"ray", "sklearn", "pandas", "torch.distributed.checkpoint"}),
    ],
)
def test_what_takes_long_to_import_is_imported_where_it_is_used(module: str, later: set[str]) -> None:
    code = f"import {module}, sys; print({later} & set(sys.modules))"
    seen = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "set()"
