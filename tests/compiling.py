"""The digits as tests compile them."""

from pathlib import Path

from upath import UPath

from app.compile.compilation import Compilation
from app.compile.report import CompileReport
from app.compile.source_model import SourceModel
from app.compile.variants import RequestedVariants, Variant
from app.config import CompileConfig, ComputePrecision, EngineName
from app.runs import Run
from tests.helpers import ROOT, train_alone

DIGITS = str(ROOT / "recipes/digits.yaml")

TUNED = ["tuned_from={run: 20261123-search, trial: 3}"]


def train_digits(folder: Path) -> UPath:
    """Train a model on the digits, and return its storage."""
    train_alone(f"storage={folder}", "train.epochs=4", *TUNED, recipe=DIGITS)
    return UPath(folder)


def digits_in(storage: UPath) -> UPath:
    """Return the weights that ``train_digits`` saved."""
    return next((storage / "runs/train").iterdir()) / "weights"


def report_in(run: Run) -> CompileReport:
    return CompileReport.model_validate_json((run.folder / "report.json").read_bytes())


def on_cpu(engine: EngineName, precision: ComputePrecision) -> Variant:
    return Variant(engine=engine, precision=precision, device="cpu")


def compilation_of(source_model: SourceModel, folder: Path, *variants: Variant) -> Compilation:
    config = CompileConfig(batch_sizes=[1])
    return Compilation(source_model, config, RequestedVariants(list(variants), [], []), folder, print)


def on_gpu(sparse: bool = False) -> Variant:
    return Variant(engine="tensorrt_rtx", precision="fp32", device="gpu", sparse=sparse)
