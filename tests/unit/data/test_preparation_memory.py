"""Preparation in bounded memory for any rows, with the same result as without a bound."""

import io
import random
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from app.config import ColumnsConfig, DataConfig
from app.data.preparation import sample, signatures
from app.data.preparation.encoding import Encoding
from app.data.preparation.samples import Documents
from app.data.preparation.signatures import signatures_of
from app.data.preparation.work import UnitWork
from app.data.sources.cells import Rows
from app.data.sources.formats.base import DOCUMENTS, Piece
from app.data.sources.labelled import INPUT, LABEL, labelled_columns
from app.data.sources.source import Source
from app.data.sources.units import Unit, cut_units, list_files, read_unit
from tests.preparing import WORDS, language_recipe, write_table

COLUMNS = labelled_columns(ColumnsConfig(), "text")


def texts_of(rows: Rows) -> list[str]:
    texts: list[str] = rows.cells[INPUT].to_pylist()
    return texts


def peak_of(work: Callable[[], object]) -> int:
    """Return the peak bytes that a function allocates."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def long_texts() -> list[str]:
    """A text with spaces and one without, each of over 300,000 characters."""
    source = random.Random(0)
    words = " ".join(f"{source.choice(WORDS)}{source.randrange(3000)}" for _ in range(40_000))
    return [words, "".join(chr(0x4E00 + source.randrange(5000)) for _ in range(300_000))]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_texts_that_are_stored_once_are_read_a_few_at_a_time(tmp_path: Path, kind: str) -> None:
    """The metadata of a file count a repeated text once."""
    texts = [f"{number % 7}" * (50_000 if number > 1000 else 10) for number in range(3000)]
    labels = [f"{number}" for number in range(3000)]
    table = pa.table({"text": pa.array(texts).dictionary_encode(), "label": labels})
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pa.parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    assert path.stat().st_size < 10**6
    unit = Unit(0, (Piece(str(path), kind, path.stat().st_size),))
    batches = list(read_unit(unit, COLUMNS))
    assert [text for batch in batches for text in texts_of(batch)] == texts
    assert [label for batch in batches for label in batch.cells[LABEL].to_pylist()] == labels
    assert max(sum(map(len, texts_of(batch))) for batch in batches) < 8 * 2**20
    assert len(batches) < 100


def test_a_few_long_documents_are_all_in_the_sample() -> None:
    for draw in range(100):
        hashes = np.random.default_rng(draw).integers(2**63, size=2, dtype=np.uint64)
        builder = sample.SampleBuilder(1.0, 1_600_000, cuts=True)
        builder.add(0, ["a" * 1_000_000, "b" * 1_000_000], hashes)
        assert {item[:1] for item in builder.build().inputs} == {"a", "b"}


def test_the_first_rows_of_a_row_group_fit_into_memory(tmp_path: Path) -> None:
    path, text = tmp_path / "texts.parquet", np.random.default_rng(0).integers(32, 127, 2**20, np.uint8)
    texts = [np.roll(text, number).tobytes().decode() for number in range(64)]
    pa.parquet.write_table(pa.table({"text": texts}), path)
    unit = Unit(0, (Piece(str(path), "parquet", path.stat().st_size),))
    sizes = [len(batch) for batch in read_unit(unit, Documents().columns(DataConfig(source="documents")))]
    assert sum(sizes) == 64
    assert max(sizes) <= 4  # of about 4 MiB together


def tar_of(path: Path, count: int) -> Unit:
    """Write a tar of so many samples."""
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            for extension in ("txt", "cls"):
                member = tarfile.TarInfo(f"{number:06d}.{extension}")
                member.size = 6
                tar.addfile(member, io.BytesIO(f"{number:06d}".encode()))
    return Unit(0, (Piece(str(path), "tar", path.stat().st_size),))


def test_a_tar_of_many_members_takes_little_memory(tmp_path: Path) -> None:
    few, many = (tar_of(tmp_path / f"{count}.tar", count) for count in (1, 4000))

    def read(unit: Unit) -> int:
        return sum(len(rows) for rows in read_unit(unit, COLUMNS))

    assert read(few) == 1  # imports what reading needs
    found: list[int] = []
    assert peak_of(lambda: found.append(read(many))) < 4 * 2**20
    assert found == [4000]


def test_a_long_row_of_csv_is_read_once(tmp_path: Path) -> None:
    """Small blocks are read until a row does not fit. Those before it are not read twice."""
    path = tmp_path / "rows.csv"
    rows = [(f"{number} " + "x" * (6 * 2**20 if number == 2500 else 2000), str(number)) for number in range(4000)]
    write_table(path, rows, ["text", "label"])
    unit = Unit(0, (Piece(str(path), "csv", path.stat().st_size),))
    batches = list(read_unit(unit, COLUMNS))
    assert [
        (item, label)
        for part in batches
        for item, label in zip(texts_of(part), part.cells[LABEL].to_pylist(), strict=True)
    ] == rows


def test_csv_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write_table(path, [("x" * 1000, "a")] * 60_000, ["text", "label"])
    read = (
        "import re, sys, pathlib\n"
        "from app.config import ColumnsConfig\n"
        "from app.data.sources.labelled import labelled_columns\n"
        "from app.data.sources.formats.base import Piece\n"
        "from app.data.sources.units import Unit, read_unit\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', pathlib.Path('/proc/self/status').read_text())[1])\n"
        "before, unit = peak(), Unit(0, (Piece(sys.argv[1], 'csv', int(sys.argv[2])),))\n"
        "assert sum(len(rows) for rows in read_unit(unit, labelled_columns(ColumnsConfig(), 'text'))) == 60_000\n"
        "print(peak() - before)\n"
    )
    told = subprocess.check_output([sys.executable, "-c", read, str(path), str(path.stat().st_size)], text=True)
    assert int(told) < 150_000  # kilobytes


def test_the_signature_of_a_text_does_not_depend_on_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a short text that comes first", *long_texts(), None, "a short text that comes last"]
    whole = signatures_of(texts)
    monkeypatch.setattr(signatures, "_PIECE_UNITS", 1000)
    assert np.array_equal(signatures_of(texts), whole)


def test_the_signature_of_a_long_text_takes_little_memory() -> None:
    for text in (words * 8 for words in long_texts()):
        assert peak_of(lambda text=text: signatures_of([text])) < 16 * len(text)  # type: ignore[misc]


def test_the_sample_of_a_compressed_source_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a file does not tell how much text is in it."""
    monkeypatch.setattr(sample, "SAMPLE_SIZE", 200_000)
    texts = [f"{number} {WORDS[number % 10] * 1000}" for number in range(2000)]
    pa.parquet.write_table(pa.table({"text": texts}), tmp_path / "texts.parquet", compression="zstd")
    recipe = language_recipe(tmp_path / "texts.parquet")
    files = list_files(Source(recipe.data.source), DOCUMENTS)
    units = tuple(cut_units(files, 10**9))
    work = UnitWork(str(tmp_path), Encoding(Documents(), recipe.data), units, sample_fraction=1.0)
    work.survey(0)
    assert 100_000 < work.file("sample", 0).stat().st_size < 300_000


@pytest.mark.slow
def test_preparation_adds_no_memory_to_the_training_that_follows(tmp_path: Path) -> None:
    """The second run finds the shards that the first one has prepared in the same process as it trained."""
    source, path = random.Random(0), tmp_path / "texts.csv"
    rows = [(f"{number} {' '.join(source.choices(WORDS, k=35))}", f"{number % 3}") for number in range(250_000)]
    write_table(path, rows, ["text", "label"])
    overrides = [
        f"data.source={path}",
        f"storage={tmp_path}/storage",
        "data.validation_fraction=0.002",
        "model.args={layers: 1, width: 32, heads: 2}",
        "train.epochs=1",
        "train.max_steps=2",
        "train.linear_baseline=false",
        "train.report_samples=0",
    ]
    train = (
        "import re, sys, pathlib\n"
        "from app.training.__main__ import main\n"
        "assert main(['recipes/reviews.yaml', *sys.argv[1:]]) == 0\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', pathlib.Path('/proc/self/status').read_text())[1])\n"
    )
    runs = [subprocess.check_output([sys.executable, "-c", train, *overrides], text=True) for _ in range(2)]
    with_preparation, without = (int(told.splitlines()[-1]) for told in runs)
    assert with_preparation - without < 50_000  # kilobytes
