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

What limits these results:

- **Speed of bf16**: OpenVINO's bf16 speed depends on AMX. On a CPU with AMX, on 2026-11-22, minilm was 2.6 to 4.7
  times as fast in bf16 as ONNX Runtime in fp32. int8 gains from VNNI.
- **Speed of int8**: an int8 file keeps some operations in float: attention's products, softmax, norms, GELU, and
  layers that the cosine gate keeps in float. OpenVINO computes these in float32, but in bf16 for a bf16 variant.
  Their share grows with the length of the text.
- **First answer**: imports take time before anything is loaded. The last table shows the time of each part."""


def report(found: Findings) -> str:
    """The whole of RESULTS.md."""
    sections = (_title(found), _goals(found), _variants(found), _speed(found), _starts(found))
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _title(found: Findings) -> str:
    return f"""
# Compile: results

`make bench-compile`, {found.num_rounds} rounds, {found.threads} threads for
every engine. {machine()}. Relevant instruction sets:
{", ".join(cpu_features()) or "none"}.
{versions(_PACKAGES)}.
{found.conditions} A load above 0.5 before
the run means that other work used part of the cores. Single figures are then unreliable; ratios of consecutive
calls are more reliable."""


def _goals(found: Findings) -> str:
    rows = [(goal.what, goal.goal, goal.reached, goal.verdict) for goal in goals(found)]
    return (
        table(("what", "goal", "reached", ""), rows)
        + (
            '\n\n"Times as fast" is the median over the rounds of the ratio within each round. The worst setting '
            "decides. The speed goals assume a CPU with AVX-512 VNNI and BF16."
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

Variants are built and evaluated as by `jobs.compile`, with the recipe's gates, on the whole validation split. The
cosine similarity compares a row's outputs with PyTorch's. The table has its mean and its minimum. "Difference" is
the largest difference of a single output. Inputs of both Transformers are padded to buckets. digits, reviews and
fashion are trained by the benchmark, for fewer epochs than in their recipes. resnet50 has random weights and gets
crops of two photographs. minilm is a pretrained sentence encoder. It gets docstrings and Chinese reviews, and
returns embeddings. Accuracy is not meaningful for resnet50 and minilm.{others}{left_out}"""


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
    header = ("model", "setting", "engine", "ms per call", f"{BASELINE} / it")
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

Each cell is the median over the rounds, with the minimum and maximum. Ratios are computed within each round, and the
table has their median. Each engine runs in its own process, with {found.threads} threads and one stream, and is
warmed up. In each round the engines take turns at each setting, and each round starts with a different one. A call
is `Engine.infer`, from NumPy arrays to NumPy arrays, with input checks. Rows are real data. Rows of texts have the
stated number of tokens, including padding.{absent}"""


def _starts(found: Findings) -> str:
    header = ("OpenVINO's cache", *(f"{phase}, s" for phase in PHASES), "load and answer, s", "with imports, s")
    rows = [
        (start.cache, *(str(start.phase(phase)) for phase in PHASES), str(start.load_to_answer), str(start.whole))
        for start in found.starts
    ]
    return f"""
## From a new process to the first answer

{table(header, rows)}

Each start of the published encoder runs in a new process. **interpreter**: from starting the process to the first line
of Python. **imports**: `app.published.loaded` and its dependencies. **load**: `load_model`, which fetches the version's
files, verifies the sha256 of each, loads the tokenizer and the engine, and runs one row. **answer**: one text, from
tokens to the embedding. The version's files are in the page cache. A cold OpenVINO cache is an empty folder. A warm one
was filled by an earlier process. The first goal covers load and answer, and the second also the imports."""
