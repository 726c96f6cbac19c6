"""What the pages name exists: commands, options, recipes and their keys, modules, files. Every key is described."""

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

from app.cli.main import app
from app.config import Recipe, load_recipe
from docs.generated_pages import PAGES
from tests.helpers import ROOT
from tests.pages import Command, blocks, commands, links, pages

COMMANDS = list(commands())
GUIDES = ("how-to", "tutorial")
_PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]{2,}\b")  # such as RUN_ID: the reader puts a value there


def undescribed(path: str, section: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of a section, and of the sections in it, that the schema says nothing about."""
    for name, field in section["properties"].items():
        mapped = field.get("patternProperties", {}).values()
        options = [field, *field.get("anyOf", []), field.get("items", {}), *mapped]
        inner = [definitions[option["$ref"].rpartition("/")[2]] for option in options if "$ref" in option]
        if not any(schema.get("description") for schema in (field, *inner)):
            yield path + name
        for item in inner:
            yield from undescribed(f"{path}{name}.", item, definitions)


def test_every_key_of_a_recipe_has_a_description() -> None:
    schema = Recipe.model_json_schema()
    assert list(undescribed("", schema, schema["$defs"])) == []


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parse the arguments of ``rayloom`` as it would, without running it. Return the parameters of the command."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("rayloom", arguments)
    while isinstance(command, TyperGroup):
        name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, list(arguments), parent=context)
    parameters: dict[str, Any] = context.params
    return parameters


def require_recipe(recipe: str, overrides: list[str]) -> None:
    """Load a recipe of the repository with the overrides. A recipe that the reader brings is not looked at."""
    if recipe in ("recipes/my_project.yaml", "recipes/tickets.yaml"):  # as 'rayloom init' writes them
        recipe = "app/project/template/recipes/my_project.yaml"
    if recipe.startswith(("recipes/", "app/")):
        load_recipe(
            str(ROOT / recipe),
            [override for override in overrides if not _PLACEHOLDER.search(override.partition("=")[2])],
        )


def module_of(words: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """Return the module that a command runs with ``-m``, and its arguments."""
    if "-m" not in words:
        return None
    place = words.index("-m") + 1
    return words[place], list(words[place + 1 :])


def test_the_pages_have_commands() -> None:
    assert len(COMMANDS) > 40
    assert {command.words[0] for command in COMMANDS} >= {"rayloom", "make", "torchrun", "ray"}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.words[0] == "rayloom"], ids=str)
def test_a_command_of_rayloom_is_one(command: Command) -> None:
    parameters = parse(list(command.words[1:]))
    if recipe := parameters.get("recipe"):
        require_recipe(recipe, parameters["overrides"] or [])


@pytest.mark.parametrize("command", [command for command in COMMANDS if "-m" in command.words], ids=str)
def test_a_module_that_a_command_runs_exists(command: Command) -> None:
    module, arguments = module_of(command.words) or ("", [])
    found = importlib.util.find_spec(module)
    assert found, module
    assert found.submodule_search_locations is None or importlib.util.find_spec(f"{module}.__main__"), module
    if module.startswith(("jobs.", "app.")) and arguments:
        processes = [f"train.workers={command.words[2]}"] if command.words[0] == "torchrun" else []
        require_recipe(arguments[0], [*arguments[1:], *processes])


def test_a_test_pastes_every_page_with_commands() -> None:
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests/e2e").glob("test_*.py"))
    how_to = {command.page.name for command in COMMANDS if command.page.parent.name == "how-to" and not command.mark}
    assert how_to
    assert [page for page in sorted(how_to) if page not in tests] == []


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {target for command in COMMANDS if command.words[0] == "make" for target in command.words[1:]}
    assert named
    assert named <= targets


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_yaml_of_a_page_is_a_recipe_or_completes_one(page: Path, tmp_path: Path) -> None:
    of_images, of_texts = (
        yaml.safe_load((ROOT / f"recipes/{name}.yaml").read_text(encoding="utf-8")) for name in ("digits", "reviews")
    )
    for block in blocks(page, "yaml"):
        keys = yaml.safe_load(block)
        needs_text = "tokens_per_batch" in block or "text:" in block
        base = {} if "data" in keys else of_texts if needs_text else of_images
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(base | keys))
        load_recipe(str(tmp_path / "recipe.yaml"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_python_of_a_page_is_valid_and_imports_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("app."):
                module = importlib.import_module(node.module)
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    files = [link.partition("#")[0] for link in links(page) if "://" not in link and not link.startswith("#")]
    generated = {ROOT / "docs/reference" / name for name in PAGES}  # by 'make docs'
    missing = [file for file in files if not ({(page.parent / file).resolve()} & generated)]
    assert [file for file in missing if not (page.parent / file).exists()] == []


def test_the_site_groups_its_pages_as_the_readme_does() -> None:
    listed = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Documentation")[2].split("\n- ")[1:]
    readme = {item.partition(":")[0]: re.findall(r"\(docs/(.+?)\.md\)", item.partition("\n\n")[0]) for item in listed}
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    trees = re.findall(r"{toctree}\n:caption: (\w+)\n:hidden:\n(.+?)\n```", index, flags=re.DOTALL)
    site = {caption: pages.splitlines() for caption, pages in trees}
    assert {name: site.get(name) for name in readme} == readme
    guides = [page.relative_to(ROOT / "docs").with_suffix("") for page in pages() if page.parent.name in GUIDES]
    assert sorted(page for group in readme.values() for page in group) == sorted(map(str, guides)), (
        "each guide is in one group"
    )


def test_commands_for_a_gpu_or_a_cloud_are_marked() -> None:
    for command in COMMANDS:
        words = " ".join(command.words)
        if command.words[:2] in {("ray", "up"), ("ray", "dashboard")}:
            assert command.mark == "# needs a cloud", str(command)
        elif re.search(r"device=gpu|gpus\w*[=:] ?[1-9]", words):
            assert command.mark in ("# needs a GPU", "# needs a cloud"), str(command)
