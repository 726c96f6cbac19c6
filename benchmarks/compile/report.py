"""RESULTS.md: what was reached, beside the goals."""

from collections.abc import Iterator

from app.compile.records import VariantRecord
from benchmarks.compile.coldstart import PHASES
from benchmarks.compile.contenders import BASELINE
from benchmarks.compile.findings import Compiled, Findings
from benchmarks.compile.goals import goals
from benchmarks.machine import cpu_features, machine, versions
from benchmarks.markdown import table

_PACKAGES = ("rayloom", "openvino", "onnxruntime", "torch", "transformers")

_HOLDS_BACK = """

What holds them back:

- **Speed of bf16**: OpenVINO is faster in it by AMX. On a CPU with AMX, on 2026-11-22, minilm was 2.6 to 4.7 times as
  fast in bf16 as ONNX Runtime in fp32. int8 gains from VNNI.
- **Speed of int8**: what is left in float of an int8 file, attention's products, softmax, norms, GELU and layers which
  the gate on the cosine keeps there, OpenVINO computes in float32, where it computes it in bf16 of a bf16 variant. It
  weighs more the longer the text.
- **First answer**: imports, before anything is loaded; the last table says what each part takes."""


def report(found: Findings) -> str:
    """The whole of RESULTS.md."""
    sections = (_title(found), _goals(found), _variants(found), _speed(found), _starts(found))
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _title(found: Findings) -> str:
    return f"""
# Compile: results

`make bench-compile`, {found.num_rounds} rounds, {found.threads} threads for
every engine. {machine()}; of the instructions that matter it has
{", ".join(cpu_features()) or "none"}.
{versions(_PACKAGES)}.
{found.conditions} Anything above 0.5 before
means that other work took part of the cores, and that single numbers are worth little; ratios of calls
that follow each other are worth more."""


def _goals(found: Findings) -> str:
    rows = [(goal.what, goal.goal, goal.reached, goal.verdict) for goal in goals(found)]
    return (
        table(("what", "goal", "reached", ""), rows)
        + (
            "\n\nTimes as fast: of each round the ratio, of the rounds the median; the worst setting decides. "
            "The goals of speed are for a CPU with AVX-512 VNNI and BF16."
        )
        + _HOLDS_BACK
    )


def _variants(found: Findings) -> str:
    header = ("model", "OpenVINO", "MB", "/ fp32", "accuracy", "/ fp32", "cosine", "worst row", "difference", "")
    rows = [row for compiled in found.compiled.values() for row in _variant_rows(compiled)]
    others = "".join(
        f"\n- **{name}** is served by {one.chosen}"
        for name, one in found.compiled.items()
        if one.chosen.engine != "openvino"
    )
    left_out = "".join(f"\n- **{name}** was left out: {why}" for name, why in found.left_out.items())
    return f"""
## Variants

{table(header, rows)}

As `jobs.compile` makes and judges them, by the recipe's gates, on the whole validation split. Cosine: of a row's
answers to PyTorch's, the mean and the least; difference: the largest of one answer. Both Transformers are padded to
buckets. digits, reviews and fashion are trained by the benchmark, for fewer epochs than their recipes say; resnet50 has
fresh weights and sees cuts of two photographs; minilm, a pretrained sentence encoder, sees docstrings and Chinese
reviews, and answers embeddings. Of the last two accuracy says nothing.{others}{left_out}"""


def _variant_rows(one: Compiled) -> Iterator[tuple[str, ...]]:
    for precision, record in one.records.items():
        yield (
            one.model.name,
            precision,
            f"{record.size_bytes / 1e6:.2f}",
            f"{one.size_ratio(precision):.3f}",
            f"{record.accuracy:.4f}" if one.model.has_accuracy else "",
            f"{one.accuracy_kept(precision):.4f}" if one.model.has_accuracy else "",
            f"{record.cosine:.5f}",
            f"{record.worst_cosine:.5f}",
            f"{record.max_difference:.1e}",
            "; ".join(_notes(record, is_chosen=record.variant == one.chosen)),
        )
    for precision, why in one.refused.items():
        yield one.model.name, precision, "", "", "", "", "", "", "", f"none: {why}"


def _notes(record: VariantRecord, is_chosen: bool) -> Iterator[str]:
    if record.quantization is not None:
        yield str(record.quantization)
    if not record.passed:
        yield f"refused: {', '.join(record.reasons)}"
    if is_chosen:
        yield "**chosen**"


def _speed(found: Findings) -> str:
    header = ("model", "setting", "engine", "ms a call", f"{BASELINE} / it")
    rows = [
        (
            one.model.name,
            str(setting),
            name,
            str(latency),
            "" if name == BASELINE else str(one.race.speed_up(setting, name, BASELINE)),
        )
        for one in found.compiled.values()
        for setting, latencies in one.race.latencies.items()
        for name, latency in latencies.items()
    ]
    absent = "".join(
        f"\n- **{name}** does not run {one.model.name} here: {why}"
        for one in found.compiled.values()
        for name, why in one.race.absent.items()
    )
    return f"""
## Speed

{table(header, rows)}

Medians over rounds, with the least and the most; a ratio is taken in each round, then its median. Each engine has a
process of its own, {found.threads} threads and one stream; all are warm. In a round they take turns at each setting,
and each round begins with another. A call is `Engine.infer`, from numpy arrays to numpy arrays, inputs checked; rows
are real, those of texts of that length in tokens, padding included.{absent}"""


def _starts(found: Findings) -> str:
    header = ("OpenVINO's cache", *(f"{phase}, s" for phase in PHASES), "load and answer, s", "with imports, s")
    rows = [
        (start.cache, *(str(start.phase(phase)) for phase in PHASES), str(start.load_to_answer), str(start.whole))
        for start in found.starts
    ]
    return f"""
## From a new process to the first answer

{table(header, rows)}

The published encoder, in a process of its own each time. **interpreter**: from starting the process to the first line
of Python. **imports**: `app.published.loaded` and what it needs. **load**: `load_model`, which fetches the
version's files, compares each with its sha256, loads tokenizer and engine and runs one row. **answer**: one text, from
tokens to the embedding. The version's files are in the page cache; a cold cache of OpenVINO is an empty folder, a warm
one was filled by an earlier process. The first goal is of load and answer, the second also of
the imports."""
