"""The recipe's alerts: which sentences are understood, and how others are refused."""

from pathlib import Path

import pytest
import yaml

from app.config import Recipe, dump_recipe, load_recipe
from app.config.alert_rules import (
    Duration,
    HasFallen,
    MetricRule,
    NotFinite,
    NotImproved,
    Rule,
    SilenceRule,
    Threshold,
    parse_rule,
)
from app.errors import RecipeError
from tests.helpers import ROOT

DIGITS = ROOT / "recipes/digits.yaml"


@pytest.mark.parametrize(
    ("sentence", "rule"),
    [
        ("val_loss has not improved for 3 epochs", MetricRule("val_loss", NotImproved("lower"), Duration(3, "epochs"))),
        (
            "samples_per_s has not improved for 1 step",
            MetricRule("samples_per_s", NotImproved("higher"), Duration(1, "steps")),
        ),
        (
            "f1 has not improved for 2 hours (higher is better)",
            MetricRule("f1", NotImproved("higher"), Duration(7200, "s")),
        ),
        ("loss above 5 for 20 steps", MetricRule("loss", Threshold("above", 5.0), Duration(20, "steps"))),
        ("grad_norm is above 1e3", MetricRule("grad_norm", Threshold("above", 1000.0), None)),
        ("my/metric below -.5 for 5 min", MetricRule("my/metric", Threshold("below", -0.5), Duration(300, "s"))),
        ("loss is not finite", MetricRule("loss", NotFinite(), None)),
        ("samples_per_s has fallen by 50 %", MetricRule("samples_per_s", HasFallen(0.5), None)),
        ("samples_per_s has fallen by 12.5% for 10s", MetricRule("samples_per_s", HasFallen(0.125), Duration(10, "s"))),
        ("  nothing   reported\nfor 10 min ", SilenceRule(600)),
    ],
)
def test_a_sentence_is_read(sentence: str, rule: Rule) -> None:
    assert parse_rule(sentence) == rule


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("val_loss has not imporved for 3 epochs", ["did you mean 'val_loss has not improved for 3 epochs'?"]),
        ("Nothing reportd for 10 minuts", ["did you mean 'nothing reported for 10 minutes'?"]),
        ("loss abvoe 5 for 3 step", ["did you mean 'loss above 5 for 3 steps'?"]),
        ("loss > 5", ["'loss > 5' is not a rule", "METRIC above X", "nothing reported for D", "20 steps"]),
        ("", ["'' is not a rule", "METRIC above X"]),
        ("val_loss has not improved", ["for how long", "for 3 epochs"]),
        ("grad_norm has not improved for 3 epochs", ["grad_norm", "(higher is better)", "(lower is better)"]),
        ("loss_scale has not improved for 3 epochs", ["loss_scale", "(higher is better)"]),
        ("loss above 3 (lower is better)", ["'has not improved' only"]),
        ("loss above 3 for 0 s", ["more than 0"]),
        ("val_loss has not improved for 2.5 epochs", ["2.5 epochs", "whole number"]),
        ("samples_per_s has fallen by 100 %", ["100 %", "less than 100"]),
        ("nothing reported for 10 steps", ["nothing reported for 10 min"]),
    ],
)
def test_another_sentence_is_refused_with_a_way_out(sentence: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\S") as refused:
        parse_rule(sentence)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_what_is_dumped_is_the_same_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(
        DIGITS,
        [
            "alerts=[{when: val_loss  has not improved for 3 epochs, do: [notify, pause]}]",
            "notify.webhook={url: 'env:HOOK', secret: 'file:/etc/rayloom/secret'}",
            "notify.email={host: mail.example.org, sender: a@example.org, to: [b@example.org]}",
        ],
    )
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "dumped.yaml") == recipe
    assert recipe.alerts[0].when == "val_loss has not improved for 3 epochs"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("alerts=[{when: loss is not finit, do: [stop]}]", ["alerts.0.when", "did you mean 'loss is not finite'?"]),
        ("alerts=[{when: loss is not finite, do: [page]}]", ["alerts.0.do.0", "'page'", "'notify', 'pause' or 'stop'"]),
        ("alerts=[{when: loss is not finite, do: []}]", ["alerts.0.do"]),
        ("alerts=[{when: loss is not finite, do: [pause, stop]}]", ["alerts.0.do", "keep one"]),
        ("alerts=[{whn: loss is not finite, do: [stop]}]", ["unknown key alerts.0.whn", "'when'"]),
        ("notify.webhook={url: example.org}", ["notify.webhook.url", "https://"]),
        ("notify.webhook={url: 'https://u:hunter2@example.org'}", ["notify.webhook.url", "env:NAME"]),
        ("notify.webhook={url: 'https://example.org', secret: hunter2}", ["notify.webhook.secret", "env:NAME"]),
        ("notify.email={host: h, sender: a@b, to: [a@b], username: u}", ["notify.email", "password"]),
        (
            "notify.email={host: h, sender: a@b, to: [a@b], username: u, password: 'env:P', security: none}",
            ["notify.email", "starttls or tls"],
        ),
    ],
)
def test_what_cannot_work_is_refused_and_no_secret_is_shown(override: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(DIGITS, [override])
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_the_sentences_of_the_documentation_are_understood() -> None:
    reference = (ROOT / "docs/reference/alert_rules.md").read_text(encoding="utf-8")
    text = (ROOT / "docs/how-to/get_alerts.md").read_text(encoding="utf-8")
    table = [line.split("`")[1] for line in reference.partition("## Do")[0].splitlines() if line.startswith("| `")]
    assert len([parse_rule(sentence) for sentence in table]) >= 6
    for block in text.split("```yaml\n")[1:]:
        tree = yaml.safe_load(DIGITS.read_text(encoding="utf-8")) | yaml.safe_load(block.split("```")[0])
        assert Recipe.model_validate(tree).alerts
