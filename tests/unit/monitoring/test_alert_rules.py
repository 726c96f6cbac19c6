"""The recipe's alerts: what their keys mean, and how others are refused."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from app.config import Recipe, dump_recipe, load_recipe
from app.config.alert_rules import (
    Duration,
    HasFallen,
    MetricRule,
    NotFinite,
    NotImproved,
    SilenceRule,
    Threshold,
)
from app.errors import RecipeError
from tests.helpers import ROOT

DIGITS = ROOT / "recipes/digits.yaml"

RULES = {
    "metric: loss, no_improvement_for: 3 epochs": MetricRule("loss", NotImproved("lower"), Duration(3, "epochs")),
    "metric: f1, no_improvement_for: 1 step, better: higher": MetricRule(
        "f1", NotImproved("higher"), Duration(1, "steps")
    ),
    "metric: loss, above: 5, for: 2 hours": MetricRule("loss", Threshold("above", 5.0), Duration(7200, "s")),
    "metric: grad_norm, above: 1.0e-7": MetricRule("grad_norm", Threshold("above", 1e-7), None),
    "metric: my/metric, below: -0.5, for: 5 min": MetricRule("my/metric", Threshold("below", -0.5), Duration(300, "s")),
    "metric: lr, below: 0": MetricRule("lr", Threshold("below", 0.0), None),
    "metric: loss, not_finite: true": MetricRule("loss", NotFinite(), None),
    "metric: mfu, fallen_by: 12.5%, for: 10s": MetricRule("mfu", HasFallen(0.125), Duration(10, "s")),
    "nothing_reported_for: 10 min": SilenceRule(600),
}


def test_keys_are_read_and_told_in_words() -> None:
    alerts = load_recipe(DIGITS, [f"alerts=[{', '.join(f'{{{keys}, do: [stop]}}' for keys in RULES)}]"]).alerts
    assert [alert.rule for alert in alerts] == [*RULES.values()]
    assert [alert.sentence for alert in alerts] == [
        "loss has not improved for 3 epochs", "f1 has not improved for 1 step (higher is better)",
        "loss above 5 for 2 hours", "grad_norm above 1e-07", "my/metric below -0.5 for 5 min", "lr below 0",
        "loss is not finite", "mfu has fallen by 12.5 % for 10s", "nothing reported for 10 min",
    ]  # fmt: skip


@pytest.mark.parametrize("keys", RULES)
def test_the_schema_takes_what_the_recipe_takes(keys: str) -> None:
    schema = Recipe.model_json_schema()
    alert = yaml.safe_load(f"{{{keys}, do: [stop]}}")
    validate = jsonschema.Draft202012Validator({**schema["$defs"]["AlertConfig"], "$defs": schema["$defs"]}).is_valid
    assert validate(alert)
    assert not validate({**alert, "for": "soon"})
    assert not validate({**alert, "nothing_reported_for": "3 epochs"})


def test_what_is_dumped_is_the_same_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(
        DIGITS,
        [
            "alerts=[{metric: val_loss, no_improvement_for: 3 epochs, do: [notify, pause]}, "
            "{metric: loss, above: 5, for: 3 steps, do: [stop]}]",
            "notify.webhook={url: 'env:HOOK', secret: 'file:/etc/rayloom/secret'}",
            "notify.apprise=['env:SLACK']",
            "notify.email={host: mail.example.org, sender: a@example.org, to: [b@example.org]}",
        ],
    )
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "dumped.yaml") == recipe
    dumped = yaml.safe_load(dump_recipe(recipe))["alerts"]
    assert dumped[1] == {"metric": "loss", "above": 5.0, "for": "3 steps", "do": ["stop"]}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("alerts=[{when: loss is not finite, do: [stop]}]", ["unknown key alerts.0.when", "known are metric, no_imp"]),
        (
            "alerts=[{metric: loss, not_finite: true, do: [page]}]",
            ["alerts.0.do.0", "'page'", "'notify', 'pause' or 'stop'"],
        ),
        ("alerts=[{metric: loss, not_finite: true, do: []}]", ["alerts.0.do"]),
        ("alerts=[{metric: loss, not_finite: true, do: [pause, stop]}]", ["alerts.0.do", "keep one"]),
        ("alerts=[{metrc: loss, do: [stop]}]", ["unknown key alerts.0.metrc", "'metric'"]),
        ("alerts=[{do: [stop]}]", ["alerts.0", "no rule", "no_improvement_for", "nothing_reported_for"]),
        ("alerts=[{metric: loss, do: [stop]}]", ["metric loss has no condition", "above, below"]),
        ("alerts=[{above: 1, do: [stop]}]", ["above needs the metric"]),
        ("alerts=[{metric: loss, above: 1, not_finite: true, do: [stop]}]", ["above and not_finite are two rules"]),
        ("alerts=[{metric: loss, nothing_reported_for: 1 h, do: [stop]}]", ["nothing_reported_for is a whole rule"]),
        ("alerts=[{metric: val_loss, no_improvement_for: 3 epochs, for: 2 h, do: [stop]}]", ["for goes with above"]),
        ("alerts=[{nothing_reported_for: 1 h, for: 2 h, do: [stop]}]", ["for goes with above"]),
        ("alerts=[{metric: loss, above: 1, better: lower, do: [stop]}]", ["better goes with no_improvement_for"]),
        ("alerts=[{metric: mfu, no_improvement_for: 3 epochs, do: [stop]}]", ["mfu", "add better"]),
        ("alerts=[{metric: loss_scale, no_improvement_for: 1 step, do: [stop]}]", ["loss_scale", "add better"]),
        ("alerts=[{metric: loss, above: 1, for: 10, do: [stop]}]", ["alerts.0.for is 10", "20 steps or 3 epochs"]),
        ("alerts=[{metric: loss, above: 1, for: 0 s, do: [stop]}]", ["alerts.0.for", "more than 0"]),
        ("alerts=[{metric: loss, above: 1, for: 2.5 epochs, do: [stop]}]", ["alerts.0.for", "whole number of epochs"]),
        ("alerts=[{metric: loss, above: .inf, do: [stop]}]", ["override alerts", "finite number"]),
        ("alerts=[{metric: loss, fallen_by: 50, do: [stop]}]", ["alerts.0.fallen_by is 50", "50 %"]),
        ("alerts=[{metric: loss, fallen_by: 100 %, do: [stop]}]", ["alerts.0.fallen_by", "less than 100"]),
        ("alerts=[{metric: a b, above: 1, do: [stop]}]", ["alerts.0.metric is 'a b'", "val_loss"]),
        ("alerts=[{nothing_reported_for: 3 epochs, do: [stop]}]", ["alerts.0.nothing_reported_for", "5 min or 2 h"]),
        ("alerts=[{metric: loss, hold: 3 s, above: 4, do: [stop]}]", ["unknown key alerts.0.hold", "fallen_by, for"]),
        ("notify.apprise=['slack://hunter2/b/c']", ["notify.apprise.0", "env:NAME"]),
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


def test_the_rules_of_the_documentation_are_understood() -> None:
    reference = (ROOT / "docs/reference/alert_rules.md").read_text(encoding="utf-8")
    text = (ROOT / "docs/how-to/get_alerts.md").read_text(encoding="utf-8")
    table = [line.split("`") for line in reference.partition("## Do")[0].splitlines() if line.startswith("| `")]
    assert len(table) >= 6
    for _, keys, *_ in table:
        load_recipe(DIGITS, [f"alerts=[{{{keys}, do: [stop]}}]"])
    blocks = text.split("```yaml\n")[1:]
    assert blocks
    for block in blocks:
        tree = yaml.safe_load(DIGITS.read_text(encoding="utf-8")) | yaml.safe_load(block.split("```")[0])
        assert Recipe.model_validate(tree)
