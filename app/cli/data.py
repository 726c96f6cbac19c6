"""List and delete data that was prepared as shards."""

import sys
from typing import Annotated

import typer

from app.cli.options import Json, Storage, chosen_storage
from app.cli.tables import aligned, print_json
from app.data.examples import CleaningReport
from app.errors import RequestError, StorageError

data = typer.Typer(no_args_is_help=True, help=__doc__)


@data.command("list")
def list_command(storage: Storage = None, as_json: Json = False) -> None:
    """List prepared data, the newest first, and how many runs read each."""
    from app.data.preparation.collection import list_shards  # pyarrow takes a while to import

    root = chosen_storage(storage)
    found = list_shards(root)
    if as_json:
        print_json([{"name": one.name, "source": one.index and one.index.source, "runs": one.runs} for one in found])
        return
    if not found:
        print(f"no data in {root}: 'rayloom submit prepare RECIPE' makes some; --storage names another storage")
        return
    rows = [("data", "source", "rows", "size", "created, UTC", "runs")]
    for one in found:
        index = one.index
        if index is None:
            state = "unreadable" if one.problem else "incomplete"
            rows.append((one.name, state, "", "", "", str(len(one.runs))))
            continue
        created = f"{index.created:%Y-%m-%d %H:%M}"
        rows.append(
            (one.name, index.source, f"{sum(index.rows.values()):,}", _size(index.bytes), created, str(len(one.runs)))
        )
    print("\n".join(aligned(rows)))
    print(f"in {root}", file=sys.stderr)


@data.command()
def show(
    name: Annotated[str, typer.Argument(help="The data's name, or its beginning.")],
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Show where data came from, what was dropped, with examples, and which runs read it."""
    from app.data.preparation.collection import find_shards

    found = find_shards(chosen_storage(storage), name)
    index = found.index
    if found.problem:
        raise StorageError(found.problem).of("shards.unreadable")
    if index is None:
        raise StorageError(
            f"data {found.name} is incomplete: its preparation is under way, or was interrupted and goes on with "
            "'rayloom submit prepare RECIPE'"
        ).of("shards.incomplete")
    report = CleaningReport.load(found.path)
    if as_json:
        kept = {"source": index.source, "task": index.task, "created": index.created, "bytes": index.bytes}
        counts = {split: {"rows": index.rows[split], "shards": len(index.splits[split])} for split in index.rows}
        dropped = {"cleaning": str(report), "examples": dict(report.shown), "settings": index.settings}
        print_json({"name": found.name, **kept, "splits": counts, **dropped, "runs": found.runs, "folder": found.path})
        return
    rows = [
        ("data", found.name),
        ("source", index.source),
        ("task", index.task),
        ("created", f"{index.created:%Y-%m-%d %H:%M:%S} UTC"),
        *((split, f"{count:,} rows in {len(index.splits[split]):,} shards") for split, count in index.rows.items()),
        ("size", _size(index.bytes)),
        ("cleaning", str(report)),
        *((words, repr(text)) for words, text in report.shown),
        *((key, str(value)) for key, value in index.settings.items()),
        *(("run", run) for run in found.runs),
        ("folder", str(found.path)),
    ]
    print("\n".join(aligned(rows)))


@data.command()
def delete(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="Names, or their beginnings.")] = None,
    unused: Annotated[bool, typer.Option("--unused", help="All that no run reads, of over an hour ago.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also data that runs read, or of the last hour.")] = False,
    storage: Storage = None,
) -> None:
    """Delete prepared data. Runs that read it can no longer go on or be compiled."""
    from app.data.preparation.collection import delete_shards, find_shards, list_shards

    if bool(names) == unused:
        raise RequestError("give the names of data, or --unused, and not both").of("options.contradict", "--unused")
    root = chosen_storage(storage)
    found = [one for one in list_shards(root) if one.is_unused and (force or not one.is_young)] if unused else []
    found += [find_shards(root, name) for name in names or ()]
    for one in found:
        if one.runs and not force:
            raise StorageError(
                f"data {one.name} is read by {', '.join(one.runs[:3])}{' and others' if len(one.runs) > 3 else ''}: "
                "delete these runs first with 'rayloom runs delete', or give --force"
            ).of("shards.in_use")
    for one in found:
        delete_shards(one)
        print(f"deleted {one.name}")


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
