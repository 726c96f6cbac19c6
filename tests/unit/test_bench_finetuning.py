"""The report of the benchmark of fine-tuning."""

from benchmarks.finetuning import pruning
from benchmarks.finetuning.__main__ import goals, report
from benchmarks.finetuning.contenders import CONTENDERS, Figures


def measured(**changes: Figures) -> dict[str, list[Figures]]:
    same = Figures(2.0, 0.9, 1000.0, 3.0)
    named = {name.replace("_", " "): figures for name, figures in changes.items()}
    return {name: [named.get(name, same)] * 2 for name in CONTENDERS}


def test_a_goal_that_is_missed_says_so() -> None:
    slow = measured(Rayloom=Figures(1.0, 0.9), Rayloom_from_scratch=Figures(2.0, 0.5))
    found = {goal.what: goal.verdict for goal in goals(slow)}
    assert found["steps/s ÷ Trainer's"] == "**missed**"
    assert found["LoRA: steps/s ÷ PEFT's"] == "reached"
    assert found["accuracy − from scratch's"] == "reached"
    assert found["packed: useful tokens/s ÷ Rayloom padded"] == "**missed**"


def test_the_report_has_every_contender() -> None:
    text = report(measured(), 2, 3.0, "0.1, 0.1, 0.1")
    assert all(f"| {name} |" in text for name in CONTENDERS)


def test_one_seed_that_loses_too_much_misses_the_goal_of_pruning() -> None:
    kept, lost = pruning.Accuracies(0.99, 0.80, 0.985, 0.5), pruning.Accuracies(0.99, 0.80, 0.978, 0.5)
    for found, words in (([kept] * 3, "0.50 at most | reached"), ([kept, kept, lost], "1.20 at most | **missed**")):
        text = pruning.report(found, "Load average: 0.1.")
        assert words in text
        assert "| 2 | 0.9900 | 0.8000 | " in text
