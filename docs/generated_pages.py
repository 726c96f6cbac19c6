"""Reference pages in Markdown that come from code and results: keys, commands, routes and the benchmarks' goals."""

import html
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.cli import get_docs_for_click
from typer.core import TyperGroup

from app.cli.main import app
from app.config import Recipe
from app.serving.endpoint import Endpoint
from app.serving.transport.inference_call import Admission
from app.serving.transport.routes import routes

Schema = dict[str, Any]

_RECIPE = """\
# Recipe

A recipe is one YAML file. This page lists every key, from the schema that also checks recipes. Unknown keys and wrong
types are refused. It is read by YAML 1.2: `1e3` is a number, `010` is ten, and `1:30`, `yes` and dates are texts. A
repeated key is refused, and so is a number that is not finite.

Set a key on the command line as `train.epochs=3`. Print a recipe with all its defaults with
`rayloom recipes show RECIPE`, and the JSON schema for an editor with `rayloom recipes schema`.
"""
_COMMANDS = """\
# Commands

Every command of `rayloom`, as `rayloom COMMAND --help` describes it. A refusal is one sentence on standard error, and
the exit code 2.
"""
_GOALS = """\
# Goals of the benchmarks

Every benchmark compares its measurements with goals that were set before it ran. This page counts them, with the
largest share of missed goals first. The benchmarks' own pages explain each miss. All ran on 2 cores without a GPU.

| page | missed | reached |
| --- | --- | --- |
"""
_MISSED = """
## Missed goals

A goal that needs a GPU is open, because no GPU path has run on a GPU yet.

| page | figure | goal | measured |
| --- | --- | --- | --- |
"""
_VERDICTS = ("reached", "**missed**", "open")
_BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def recipe_page() -> str:
    """Return the page of the recipe's keys: a table for each section."""
    schema = Recipe.model_json_schema()
    return "\n".join([_RECIPE, *_section("", schema, schema["$defs"])])


def _section(path: str, schema: Schema, definitions: dict[str, Schema]) -> Iterator[str]:
    """Return the lines of a section and of the sections below it; ``path`` is empty for the whole recipe."""
    title = path or "Top level"
    required = schema.get("required", [])
    yield f"(recipe-{_slug(path)})=\n\n{'##' if path.count('.') == 0 else '###'} {title}\n"
    yield f"{schema['description']}\n"
    yield "| key | type | default | description |\n| --- | --- | --- | --- |"
    below: list[tuple[str, Schema]] = []
    for name, field in schema["properties"].items():
        inner = _inner_section(field, definitions)
        full = f"{path}.{name}".removeprefix(".")
        if inner:
            below.append((full, inner))
        default = "**required**" if name in required else _default(field, inner)
        kind = f"[section](#recipe-{_slug(full)})" if inner else _type(field, definitions)
        yield f"| `{name}` | {kind} | {default} | {_cell(field.get('description') or _summary(inner))} |"
    yield ""
    for full, inner in below:
        yield from _section(full, inner, definitions)


def _inner_section(field: Schema, definitions: dict[str, Schema]) -> Schema | None:
    """Return the section that a key holds: alone, as an alternative to another value, or in a list or mapping."""
    for option in [
        field,
        *field.get("anyOf", []),
        field.get("items", {}),
        *field.get("patternProperties", {}).values(),
    ]:
        if "$ref" in option:
            return definitions[option["$ref"].rpartition("/")[2]]
    return None


def _summary(section: Schema | None) -> str:
    return section["description"].partition("\n\n")[0] if section else ""


def _default(field: Schema, section: Schema | None) -> str:
    default = field.get("default")
    told_elsewhere = default in (None, {}) or (section and isinstance(default, dict))
    return "" if told_elsewhere else f"`{json.dumps(default)}`"


def _type(field: Schema, definitions: dict[str, Schema]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(option, definitions) for option in field["anyOf"] if option.get("type") != "null")
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    kind = field.get("type")
    if kind == "array":
        items = field.get("items") or {"type": "any value"}
        return f"list of {_type(items, definitions)}" if "prefixItems" not in field else "two numbers"
    bounds = "".join(f" {sign} {field[bound]:g}" for bound, sign in _BOUNDS.items() if bound in field)
    return ("mapping" if kind == "object" else str(kind)) + bounds


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _slug(path: str) -> str:
    return re.sub(r"[._]", "-", path) or "top-level"


def commands_page() -> str:
    """Return the page of the command line: what typer says of each command."""
    command = typer.main.get_command(app)
    return "\n".join([_COMMANDS, *_command("rayloom", command, typer.Context(command))])


def _command(name: str, command: Any, context: Any) -> Iterator[str]:
    """Yield the text of a command, or of a group's commands."""
    if isinstance(command, TyperGroup):
        for below in command.list_commands(context):
            yield from _command(f"{name} {below}", command.resolve_command(context, [below])[1], context)
    else:
        yield html.unescape(get_docs_for_click(obj=command, ctx=context, name=name, indent=1))


def routes_page() -> str:
    """Return the page of the endpoint's HTTP routes, from its OpenAPI document."""
    lines = ["# HTTP routes", "", "From the document at `/openapi.json`.", "", "| route | |", "| --- | --- |"]
    for path, methods in routes(Admission(Endpoint())).openapi()["paths"].items():
        for method, operation in methods.items():
            lines.append(f"| `{method.upper()} {path}` | {_cell(operation.get('description', operation['summary']))} |")
    return "\n".join([*lines, ""])


class Goal(NamedTuple):
    """A row of a benchmark's table of goals."""

    what: str
    goal: str
    reached: str
    verdict: str


def goals_of(page: Path) -> list[Goal]:
    """Return the goals in the tables of a benchmark's page. The name of a figure may span several cells."""
    rows = [line.split("|")[1:-1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    judged = [row for row in ([cell.strip() for cell in row] for row in rows) if row[-1] in _VERDICTS]
    return [Goal(", ".join(what), goal, reached, verdict) for *what, goal, reached, verdict in judged]


def goals_page() -> str:
    """Return the page that counts the goals of every benchmark, and lists those that were missed."""
    pages = {page: goals for page in sorted(_BENCHMARKS.glob("*/*.md")) if (goals := goals_of(page))}
    by_share = sorted(pages, key=lambda page: (-_count(pages[page], "**missed**") / len(pages[page]), str(page)))
    counts = "".join(
        f"| {_link(page)} | {_count(pages[page], '**missed**')} | {_count(pages[page], 'reached')} |\n"
        for page in by_share
    )
    missed = "".join(
        f"| {_link(page)} | {row.what} | {row.goal} | {row.reached if row.verdict != 'open' else 'open'} |\n"
        for page in by_share
        for row in pages[page]
        if row.verdict != "reached"
    )
    return _GOALS + counts + _MISSED + missed


def _count(goals: list[Goal], verdict: str) -> int:
    return sum(goal.verdict == verdict for goal in goals)


def _link(page: Path) -> str:
    """Return a link to a benchmark's page, by its title."""
    title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{title}](../../benchmarks/{page.relative_to(_BENCHMARKS)})"


PAGES: dict[str, Callable[[], str]] = {
    "recipe.md": recipe_page,
    "commands.md": commands_page,
    "routes.md": routes_page,
    "goals.md": goals_page,
}
