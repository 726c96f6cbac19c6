"""The recipe: what is read, what is refused, and in which words."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from app.cli.main import app
from app.config import Recipe, dump_recipe, load_recipe, parse_stored_recipe, parse_yaml, with_values
from tests.helpers import ROOT, run
from tests.wording import refused

DIGITS, REVIEWS, STDLIB = (ROOT / f"recipes/{name}.yaml" for name in ("digits", "reviews", "stdlib_gpt"))


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    Draft202012Validator.check_schema(Recipe.model_json_schema())
    return Draft202012Validator(Recipe.model_json_schema())


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*.yaml")), ids=lambda path: path.stem)
def test_recipes_load_and_fit_the_schema(path: Path, schema: Draft202012Validator) -> None:
    schema.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert load_recipe(path).name == path.stem


def test_what_show_prints_is_the_same_recipe(tmp_path: Path) -> None:
    shown = run("rayloom", "recipes", "show", str(DIGITS), "train.epochs=7")
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
    ("override", "rule", "key"),
    [
        ("train.optimzer.lr=1", "recipe.extra_forbidden", "train.optimzer"),
        ("epochs=3", "recipe.extra_forbidden", "epochs"),
        ("train.Epochs=3", "recipe.extra_forbidden", "train.Epochs"),
        ("alerts.0.metrc=x", "recipe.extra_forbidden", "alerts.0.metrc"),
        ("compile.sparsity=2:4", "recipe.literal_error", "compile.sparsity"),
        ("train.prune={weights: /w, pattern: '2:4'}", "recipe.literal_error", "train.prune.pattern"),
        ("data.seed=18446744073709551616", "recipe.less_than", "data.seed"),
        ("train.epochs=three", "recipe.int_type", "train.epochs"),
        ("train.epochs=true", "recipe.int_type", "train.epochs"),
        ("train.optimizer.lr=0", "recipe.greater_than", "train.optimizer.lr"),
        ("train.plan.zero_stage=7", "recipe.literal_error", "train.plan.zero_stage"),
        ("train.workers=3", "batch.uneven", "train"),
        ("train.workers=[5, 7]", "batch.uneven", "train"),
        ("train.workers=[4, 1]", "range.invalid", "train.workers"),
        ("train.workers=1000000000000", "range.large", "train.workers"),
        ("train.cpus_per_worker=1e305", "recipe.less_than_equal", "train.cpus_per_worker"),
        ("train.profile={wait: -1}", "recipe.greater_than_equal", "train.profile.wait"),
        ("train.plan.micro_batch=5", "batch.uneven", "train"),
        ("model.factory=small_cnn", "recipe.string_pattern_mismatch", "model.factory"),
        ("data.buckets=[64, 32]", "lengths.order", "data.buckets"),
        ("data.buckets.9=1", "index.unknown", "data.buckets.9"),
        ("train.early_stopping.mode=min", "metric.direction", "train.early_stopping.mode"),
        ("train.early_stopping={metric: val_perplexity}", "metric.unknown", "train.early_stopping.metric"),
        ("data.block_length=64", "task.unsupported", "data.block_length"),
        ("data.tokenizer={kind: bytes}", "task.unsupported", "data.tokenizer.kind"),
        ("task=image-clasification", "recipe.string_pattern_mismatch", "task"),
        ("train.epochs", "override.incomplete", None),
        ("serve.canary={percent: 0}", "recipe.greater_than", "serve.canary.percent"),
        ("serve.shadow={percent: 101}", "recipe.less_than_equal", "serve.shadow.percent"),
        ("serve.canary={version: 2}", "recipe.missing", "serve.canary.percent"),
        ("serve={version: 2, canary: {percent: 9, version: 2}}", "versions.equal", "serve"),
        ("serve.replicas=[4, 1]", "range.invalid", "serve.replicas"),
        ("compile.resources={GPU: 1}", "resources.built_in", "compile.resources"),
        ("serve.queue_limit=2000000000", "recipe.less_than_equal", "serve.queue_limit"),
        ("serve.batching.priority_levels=1000000000", "recipe.less_than_equal", "serve.batching.priority_levels"),
        ("serve.gpus_per_replica=1e-9", "amount.small", "serve.gpus_per_replica"),
        ("serve.resources={rack: 1e305}", "recipe.less_than_equal", "serve.resources.rack"),
        ("serve.resources={rack: 0}", "recipe.greater_than", "serve.resources.rack"),
        ("serve.replicas=0", "range.invalid", "serve.replicas"),
        ("serve={replicas: 2, scaling: {latency_target_ms: 50}}", "replicas.fixed", "serve"),
        ("serve.token_file=token", "path.relative", "serve.token_file"),
        ("serve={auth: none, token_file: /token}", "keys.contradict", "serve"),
        ("serve.above_training=true", "priority.nothing", "serve"),
        ("serve={above_training: true, cpus_per_replica: 1, labels: {a: b}}", "keys.contradict", "serve"),
        ("serve={fallback_labels: {market: spot}}", "labels.fallback", "serve"),
        ("serve.tls={certificate: /c.pem}", "recipe.missing", "serve.tls.key"),
        ("train={linear_baseline: true, report_samples: 0}", "keys.contradict", "train"),
        ("train.optimizer.momentum=0.9", "keys.contradict", "train.optimizer"),
        ("train.optimizer={name: sgd, betas: [0.9, 0.98]}", "keys.contradict", "train.optimizer"),
        ("data.columns={features: [a, label]}", "label.is_input", "data.columns"),
        ("data.columns={numbers: [a, b], categories: [b]}", "column.two_kinds", "data.columns"),
        ("data.columns={label: a, fields: {a: {kind: text}}}", "label.is_input", "data.columns"),
        ("data.columns={label: a, fields: {x: {kind: row, columns: [a]}}}", "label.is_input", "data.columns"),
    ],
)
def test_what_cannot_work_is_refused_with_key_value_and_way_out(override: str, rule: str, key: str | None) -> None:
    with refused(rule, key):
        load_recipe(REVIEWS, [override])


@pytest.mark.parametrize(
    ("override", "rule", "key"),
    [
        ("data.buckets=[8, 16]", "task.unsupported", "data.buckets"),
        ("train.linear_baseline=true", "task.unsupported", "train.linear_baseline"),
        ("data.tokenizer={kind: bytes, vocab_size: 512}", "keys.contradict", "data.tokenizer"),
        ("data.tokenizer.vocab_size=256", "tokenizer.too_small", "data.tokenizer.vocab_size"),
    ],
)
def test_keys_that_language_modelling_does_not_take_are_refused(override: str, rule: str, key: str) -> None:
    with refused(rule, key):
        load_recipe(STDLIB, [override])


@pytest.mark.parametrize(
    ("content", "rule", "key"),
    [("name: [", "yaml.invalid", None), ("- a", "recipe.not_keys", None), ("name: x", "recipe.missing", "task")],
)
def test_broken_files_are_refused(tmp_path: Path, content: str, rule: str, key: str | None) -> None:
    (tmp_path / "broken.yaml").write_text(content, encoding="utf-8")
    with refused(rule, key):
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


MANY = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join(9 * [f'*a{n}'])}]\n" for n in range(9))
"""A few lines of aliases that stand for 9⁹ words."""
MERGED = reduce(lambda text, n: f"{{<<: [&a{n} {text}, {', '.join(8 * [f'*a{n}'])}]}}", range(9), "{x: y}")


@pytest.mark.parametrize(
    "text",
    [
        "train: {}\ndata: {}\ntrain: {}\n",
        "train: {epochs: 1, 'epochs': 2}",
        "model: {args: {1: a, 0x1: b}}",
        "model: {args: {lr: .inf}}",
        "model: {args: {lr: -.INF}}",
        "model: {args: {lr: [.nan]}}",
        "model: {args: {lr: 1e999}}",
        "model: {args: {lr: !!int 1_0}}",
        "model: {args: {lr: !!timestamp x}}",
        "model: &it {args: *it}",
        "model: &it {<<: *it}",
        pytest.param("[" * 5000, id="deep"),
        pytest.param(MANY, id="many"),
        pytest.param(MERGED, id="merged"),
    ],
)  # fmt: skip
def test_what_yaml_could_say_in_two_ways_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.yaml").write_text(text, encoding="utf-8")
    with refused("yaml.invalid"):
        load_recipe(tmp_path / "odd.yaml")


def test_an_anchor_is_merged_and_the_own_key_wins(tmp_path: Path) -> None:
    content = REVIEWS.read_text(encoding="utf-8") + "\nnotify: {}\n"
    given = tmp_path / "merged.yaml"
    given.write_text(content + "tracking: {wandb: null, <<: {wandb: null}}\n", encoding="utf-8")
    assert load_recipe(given).tracking.wandb is None


def test_an_override_of_one_alias_leaves_the_others(tmp_path: Path) -> None:
    args = "args: {encoder: &tower {width: 64}, decoder: *tower, other: {<<: {more: *tower}}}"
    given = tmp_path / "towers.yaml"
    given.write_text(re.sub("args: .*", args, REVIEWS.read_text(encoding="utf-8")), encoding="utf-8")
    read = load_recipe(given, ["model.args.encoder.width=128"]).model.args
    assert read == {"encoder": {"width": 128}, "decoder": {"width": 64}, "other": {"more": {"width": 64}}}


@pytest.mark.parametrize("override", ["train.optimizer.lr=.inf", "train.optimizer={lr: 0.1, lr: 0.2}"])
def test_an_override_is_read_by_the_same_rules(override: str) -> None:
    with refused("yaml.invalid", override.partition("=")[0]):
        load_recipe(REVIEWS, [override])


@pytest.mark.parametrize("text", ["#ff0000", "data/part #2.csv", "[1, 2] # two", "a: b #2", "- a #2", "{a: 1} #"])
def test_an_override_with_a_comment_is_refused(text: str) -> None:
    with refused("override.comment", "model.args.given"):
        load_recipe(REVIEWS, [f"model.args.given={text}"])
    assert load_recipe(REVIEWS, [f"model.args.given='{text}'"]).model.args["given"] == text


def test_a_file_without_aliases_may_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.config.yaml_text._MAX_VALUES", 9)
    assert parse_yaml("[1, 2, 3, 4, 5, 6, 7, 8, 9]") == [*range(1, 10)]


def test_a_number_that_is_computed_is_finite_too() -> None:
    with refused("recipe.finite_number", "train.optimizer.lr"):
        with_values(load_recipe(REVIEWS), {"train.optimizer.lr": math.inf})


def test_a_plan_that_is_no_yaml_is_refused_by_its_key() -> None:
    with refused("plan.unreadable", "train.plan"):
        load_recipe(REVIEWS, ["train.plan='{zero_stage: 1'"])


def test_a_missing_file_is_refused() -> None:
    refused = run("rayloom", "recipes", "show", "recipes/nothing.yaml")
    assert refused.returncode == 2
    assert "recipes/nothing.yaml" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_all_problems_are_told_at_once() -> None:
    with refused("recipe.greater_than", "train.epochs") as error:
        load_recipe(DIGITS, ["train.epochs=0", "serve.port=0"])
    assert len(str(error.value).splitlines()) == 2


def test_the_batch_is_divided() -> None:
    train = load_recipe(DIGITS, ["train.global_batch_size=96", "train.plan.micro_batch=16"]).train
    layout = train.layout(2)
    assert (layout.data, layout.micro_batch, layout.gradient_accumulation) == (2, 16, 3)


def test_the_schema_is_printed() -> None:
    assert json.loads(run("rayloom", "recipes", "schema").stdout) == json.loads(json.dumps(Recipe.model_json_schema()))


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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["train.epochs=1", "train.epochs=2"], "'train.epochs=2' replaces 'train.epochs=1', which is given before it"),
        (["train.optimizer.lr=1", "train.optimizer={name: sgd}"], "replaces 'train.optimizer.lr=1'"),
        (["train.plan=auto", "train.plan.zero_stage=2", "train.epochs=1"], None),
    ],
)
def test_a_command_line_sets_a_key_once(given: list[str], words: str | None) -> None:
    result = CliRunner().invoke(app, ["recipes", "show", str(REVIEWS), *given])
    assert (result.exception is None) is (words is None)
    assert words is None or words in str(result.exception)
