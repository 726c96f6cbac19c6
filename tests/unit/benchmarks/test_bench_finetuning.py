"""The report of the benchmark of fine-tuning."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from app.config import BUILT_IN_TASKS
from benchmarks.finetuning import pruning, tasks
from benchmarks.finetuning.__main__ import goals, report
from benchmarks.finetuning.builtin_tasks import cases
from benchmarks.finetuning.contenders import CONTENDERS, Figures
from benchmarks.finetuning.imports import Imported
from benchmarks.machine import Conditions


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
    text = report(measured(), 2, Conditions())
    assert all(f"| {name} |" in text for name in CONTENDERS)


def test_one_seed_that_loses_too_much_misses_the_goal_of_pruning() -> None:
    kept, lost = pruning.Accuracies(0.99, 0.80, 0.985, 0.5), pruning.Accuracies(0.99, 0.80, 0.978, 0.5)
    for found, words in (([kept] * 3, "0.50 at most | reached"), ([kept, kept, lost], "1.20 at most | **missed**")):
        text = pruning.report(found, Conditions())
        assert words in text
        assert "| 2 | 0.9900 | 0.8000 | " in text


@pytest.mark.slow
def test_every_built_in_task_has_a_case_whose_inputs_are_json(tmp_path: Path) -> None:
    found = cases(tmp_path)
    assert sorted(case.task for case in found) == sorted(BUILT_IN_TASKS)
    for case in found:
        assert json.loads(json.dumps(case.inputs)) == list(case.inputs)


COMPILED = tasks.Compiled("accuracy", 0.9, 0.895, "openvino int8", 0.005, 0.01, 5, 1, 1e-6, 1e-4)
MEASURED = tasks.Measured("text-classification", 1e-6, 1e-5, COMPILED)
CHAT = tasks.Measured("chat", 1e-6, 1e-5, None)
OTHERS = [replace(MEASURED, task=name) for name in BUILT_IN_TASKS if name not in (MEASURED.task, CHAT.task)]
IMPORTED = Imported("m", "a model", "skl2onnx 1.20", 2, 3, True)


def verdicts(*found: tasks.Measured, imported: Imported = IMPORTED) -> list[str]:
    return [goal.verdict for goal in tasks.goals([*found, CHAT, *OTHERS[1:]], [IMPORTED, imported])]


def test_each_goal_of_the_tasks_is_missed_by_one_task_that_misses_it() -> None:
    assert verdicts(MEASURED, OTHERS[0]) == ["reached"] * 6
    worse = [
        (replace(MEASURED, losses_apart=math.inf), IMPORTED),
        (replace(MEASURED, metrics_apart=0.01), IMPORTED),
        (replace(MEASURED, compiled=replace(COMPILED, drop=math.nan)), IMPORTED),
        (replace(MEASURED, compiled=replace(COMPILED, answers_apart=math.inf)), IMPORTED),
        (MEASURED, replace(IMPORTED, is_equal=False)),
    ]
    assert verdicts(MEASURED) == ["**missed**", *["reached"] * 5], "a task that was not measured"
    for index, (task, model) in enumerate(worse, start=1):
        found = verdicts(OTHERS[0], task, imported=model)
        assert [place for place, words in enumerate(found) if words == "**missed**"] == [index]


def test_the_page_of_the_tasks_has_a_row_for_each_task_and_model() -> None:
    text = tasks.report([MEASURED, CHAT], [IMPORTED], "")
    assert "| text-classification | 1.0e-06 | 1.0e-05 | accuracy | 0.9000 | 0.8950 | openvino int8 | 5, 1 |" in text
    assert "| chat | 1.0e-06 | 1.0e-05 | – |" in text
    assert "| a model | skl2onnx 1.20 | 2 and 3 | yes |" in text
    assert "Not measured in this run: image-classification, " in text


def test_a_measurement_that_exists_is_kept(tmp_path: Path) -> None:
    worst = replace(MEASURED, losses_apart=math.inf)
    for made, expected in ((worst, worst), (MEASURED, worst)):
        assert tasks.keep(tmp_path / "kept/a.json", tasks.Measured, lambda made=made: made) == expected


def test_answers_differ_without_bound_where_a_text_a_key_or_a_length_differs() -> None:
    answer = {"label": "a", "scores": {"a": 0.75, "b": 0.25}, "entities": [{"start": 1}], "stage": None}
    assert tasks.answers_apart([answer], [answer]) == 0.0
    scores = {"a": 0.7, "b": 0.25}
    assert tasks.answers_apart([answer | {"scores": scores}], [answer]) == pytest.approx(0.05)
    for change in ({"label": "b"}, {"entities": []}, {"entities": [{"start": 2}]}, {"more": 1}):
        assert math.isinf(tasks.answers_apart([answer | change], [answer])), change
