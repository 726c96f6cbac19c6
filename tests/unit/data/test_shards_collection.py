"""Prepared data in storage: listed, shown, and deleted unless a run reads it."""

import json

import pytest
from typer.testing import CliRunner
from upath import UPath

from app.artifacts import DATA
from app.cli.main import app
from app.config import load_recipe
from app.data.shards import FORMAT, INDEX_FILE
from app.errors import RayloomError
from app.runs import runs_folder
from app.storage import to_path
from app.tasks import prepare


def rayloom(root: UPath, *arguments: str) -> str:
    """What the command prints; its refusal, if it refuses."""
    result = CliRunner().invoke(app, ["data", *arguments, "--storage", str(root)])
    if isinstance(result.exception, RayloomError):
        return f"refused: {result.exception}"
    assert result.exception is None, result.exception
    return result.stdout


@pytest.fixture
def root(storage: str) -> UPath:
    """Storage with two sets of shards, of which a run reads the first, and one that is incomplete."""
    root = to_path(storage)
    for seed in (0, 1):
        keys = ["data.shards={size: 200KB, window: 600KB}", f"data.seed={seed}", f"storage={storage}"]
        data = prepare(load_recipe("recipes/digits.yaml", keys))
        if not seed:
            data.save(runs_folder(root, "train") / "20260101-000000-digits-aaaa" / DATA)
            data.save(runs_folder(root, "tune") / "20260102-000000-digits-bbbb" / DATA / "0123456789ab")
    incomplete = root / "data" / "0000000000000000" / ".work"
    incomplete.mkdir(parents=True)
    (incomplete / "survey-00000.arrow").write_bytes(b"")
    return root


def test_one_index_that_cannot_be_read_does_not_hide_the_others(root: UPath) -> None:
    torn, older = root / "data" / "1111111111111111", root / "data" / "2222222222222222"
    (good, *_) = (path for path in (root / "data").iterdir() if (path / INDEX_FILE).exists())
    content = (good / INDEX_FILE).read_text()
    for folder, index in ((torn, content[:100]), (older, content.replace(FORMAT, "arrow-0"))):
        folder.mkdir(parents=True)
        (folder / INDEX_FILE).write_text(index)
    lines = [line.split() for line in rayloom(root, "list").splitlines()]
    assert {line[0] for line in lines if line[1] == "unreadable"} == {torn.name, older.name}
    assert any(line[0] == good.name and line[1] == "builtin:digits" for line in lines)
    assert "is not an index of shards" in rayloom(root, "show", torn.name)
    assert "in the format 'arrow-0'" in rayloom(root, "show", older.name)
    assert rayloom(root, "delete", torn.name, older.name) == f"deleted {torn.name}\ndeleted {older.name}\n"
    assert not (torn / INDEX_FILE).exists()


def test_data_are_listed_shown_and_deleted_when_no_run_reads_them(root: UPath) -> None:
    head, *lines = rayloom(root, "list").splitlines()
    assert head.split()[:3] == ["data", "source", "rows"]
    used, unused, incomplete = sorted((line.split() for line in lines), key=lambda line: (-int(line[-1]), line[1]))
    assert (used[-1], unused[-1]) == ("2", "0")
    assert used[1:3] == ["builtin:digits", "1,797"]
    assert incomplete[:2] == ["0000000000000000", "incomplete"]

    shown = rayloom(root, "show", used[0][:6])
    assert "1,797 examples, 1,797 kept" in shown
    assert "train/20260101-000000-digits-aaaa" in shown
    told = json.loads(rayloom(root, "show", used[0][:6], "--json"))
    assert (told["source"], sum(split["rows"] for split in told["splits"].values())) == ("builtin:digits", 1797)
    assert "train/20260101-000000-digits-aaaa" in told["runs"]
    assert "refused: data 0000000000000000 is incomplete" in rayloom(root, "show", "00000000")
    assert "has no such data ('zz')" in rayloom(root, "show", "zz")

    assert "is read by train/20260101-000000-digits-aaaa" in rayloom(root, "delete", used[0])
    assert (root / "data" / used[0] / INDEX_FILE).exists()
    assert rayloom(root, "delete", "--unused") == ""  # a run that is starting may need it
    assert rayloom(root, "delete", "--unused", "--force") == f"deleted {unused[0]}\n"
    assert rayloom(root, "delete", "00000000") == "deleted 0000000000000000\n"
    assert rayloom(root, "delete", used[0], "--force") == f"deleted {used[0]}\n"
    assert "no data" in rayloom(root, "list")
    assert "give the names of data, or --unused" in rayloom(root, "delete")
