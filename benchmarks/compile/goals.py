"""What was to be reached, beside what was."""

from collections.abc import Iterator, Mapping, Sequence

from app.config import ComputePrecision
from benchmarks.compile.contenders import BASELINE, EAGER, name_of, openvino
from benchmarks.compile.findings import Compiled, Findings
from benchmarks.compile.models import MODELS, Setting
from benchmarks.machine import cpu_features
from benchmarks.markdown import Goal, verdict

ENCODER, RESNET = "minilm", "resnet50"
SIZE = 0.27
ACCURACY_KEPT: Mapping[ComputePrecision, float] = {"int8": 0.99, "bf16": 0.999}
COSINE = 0.99
FASTER_THAN_BASELINE: tuple[tuple[str, ComputePrecision, float], ...] = (
    (RESNET, "int8", 3.3),
    (ENCODER, "bf16", 2.0),
    (ENCODER, "int8", 3.3),
)
FASTER_THAN_EAGER = 5.0
LOAD_S = 0.4
START_S = 0.5
_SPEED_NEEDS = ("avx512_vnni", "avx512_bf16")


def goals(found: Findings) -> list[Goal]:
    """Every goal, also those of models that were left out."""
    return [*_sizes(found), *_accuracies(found), _cosine(found), *_speeds(found), _eager(found), *_starts(found)]


def _sizes(found: Findings) -> Iterator[Goal]:
    for name in MODELS:
        what, goal = f"{name}: bytes of int8 / fp32", f"≤ {SIZE}"
        if (reason := _missing(found, name, "int8")) is not None:
            yield Goal(what, goal, reason, "open")
        else:
            ratio = found.compiled[name].size_ratio("int8")
            yield Goal(what, goal, f"{ratio:.3f}", verdict(ratio <= SIZE))


def _accuracies(found: Findings) -> Iterator[Goal]:
    for precision, least in ACCURACY_KEPT.items():
        for name in (name for name, model in MODELS.items() if model.has_accuracy):
            what, goal = f"{name}: accuracy of {precision} / fp32", f"≥ {least}"
            if (reason := _missing(found, name, precision)) is not None:
                yield Goal(what, goal, reason, "open")
            else:
                kept = found.compiled[name].accuracy_kept(precision)
                yield Goal(what, goal, f"{kept:.4f}", verdict(kept >= least))


def _cosine(found: Findings) -> Goal:
    """A variant that misses it may be refused, if bf16 is served in its place."""
    what, goal = f"{ENCODER}: mean cosine of int8 to PyTorch", f"≥ {COSINE}, or refused and bf16 taken"
    one = found.compiled.get(ENCODER)
    if one is None:
        return Goal(what, goal, found.left_out.get(ENCODER, "not asked for"), "open")
    record = one.records.get("int8")
    if record is None:
        reached = f"none, {one.chosen} taken: {one.refused.get('int8', 'not asked for')}"
        return Goal(what, goal, reached, verdict(one.chosen.precision == "bf16"))
    reached = f"{record.cosine:.4f}, worst row {record.worst_cosine:.4f}"
    if not record.passed:
        reached += f"; refused, {one.chosen} taken"
    return Goal(what, goal, reached, verdict(record.cosine >= COSINE or one.chosen.precision == "bf16"))


def _speeds(found: Findings) -> Iterator[Goal]:
    for name, precision, least in FASTER_THAN_BASELINE:
        what, goal = f"{name}: OpenVINO {precision} / {BASELINE}, times as fast", f"≥ {least}"
        if (reason := _missing(found, name, precision)) is not None:
            yield Goal(what, goal, reason, "open")
        else:
            one = found.compiled[name]
            yield _faster(one, one.settings, what, goal, openvino(precision), BASELINE, least)


def _eager(found: Findings) -> Goal:
    what, goal = f"{ENCODER}: chosen variant / {EAGER}, times as fast", f"≥ {FASTER_THAN_EAGER:g} at batch 1"
    one = found.compiled.get(ENCODER)
    if one is None:
        return Goal(what, goal, found.left_out.get(ENCODER, "not asked for"), "open")
    what = f"{ENCODER}: chosen variant, {one.chosen}, / {EAGER}, times as fast"
    if (name := name_of(one.chosen)) is None:
        return Goal(what, goal, "not timed", "open")
    of_one_row = [setting for setting in one.settings if setting.batch_size == 1]
    return _faster(one, of_one_row, what, goal, name, EAGER, FASTER_THAN_EAGER)


def _faster(
    one: Compiled, settings: Sequence[Setting], what: str, goal: str, name: str, over: str, least: float
) -> Goal:
    """The setting that is worst decides; of a CPU that lacks the instructions nothing is asked."""
    if name in one.race.absent:
        return Goal(what, goal, one.race.absent[name], "open")
    ratios = {setting: one.race.speed_up(setting, name, over) for setting in settings}
    reached = "; ".join(f"{setting}: {ratio.median:.2f}" for setting, ratio in ratios.items())
    if lacking := [feature for feature in _SPEED_NEEDS if feature not in cpu_features()]:
        return Goal(what, goal, reached, f"open: a CPU without {' and '.join(lacking)}")
    return Goal(what, goal, reached, verdict(min(ratio.median for ratio in ratios.values()) >= least))


def _starts(found: Findings) -> list[Goal]:
    load = f"{ENCODER}: seconds from its load to the first answer, warm cache"
    start = f"{ENCODER}: seconds from the first line of Python to the first answer, warm cache"
    warm = next((starts for starts in found.starts if starts.cache == "warm"), None)
    if warm is None:
        absent = found.left_out.get(ENCODER, "not measured")
        return [Goal(load, f"≤ {LOAD_S}", absent, "open"), Goal(start, f"≤ {START_S}", absent, "open")]
    load_s, start_s = warm.load_to_answer.median, warm.whole.median
    return [
        Goal(load, f"≤ {LOAD_S}", f"{load_s:.2f}", verdict(load_s <= LOAD_S)),
        Goal(start, f"≤ {START_S}", f"{start_s:.2f}", verdict(start_s <= START_S)),
    ]


def _missing(found: Findings, name: str, precision: ComputePrecision) -> str | None:
    """Why there are no numbers of a model in a precision; None if there are."""
    if name not in found.compiled:
        return found.left_out.get(name, "not asked for")
    one = found.compiled[name]
    return None if precision in one.records else one.refused.get(precision, "not asked for")
