"""YAML as every file and override is read and written: the core schema of YAML 1.2, each key once, finite numbers."""

import math
import re
from itertools import pairwise
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from app.uris import shown

_TAG = "tag:yaml.org,2002:"
_INT = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_NOT_FINITE = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", f"{_FLOAT}|{_NOT_FINITE}", list("-+.0123456789")),
    # YAML 1.2 has no merge keys, and many people write them.
    ("merge", "<<", ["<"]),
)
"""How plain words are read, each with the characters that it may begin with. All other words are texts."""


class _Loader(yaml.SafeLoader):
    """Reads plain words by ``_SCALARS``. It refuses a key that is there twice, an infinite number, and other tags."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - those of YAML 1.1 are not inherited
    yaml_constructors = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("null", "bool", "str", "seq", "map")
    } | {f"{_TAG}merge": yaml.SafeLoader.construct_yaml_str}

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._num_values = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Count the values of a node, whose aliases PyYAML expands later. Refuse an alias that never ends, or many."""
        event, before = self.peek_event(), self._num_values  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            if node not in self._sizes:
                raise _refusal(event, f"alias *{event.anchor} is within its own anchor: write the values instead")
            self._num_values += self._sizes[node]
            if self._num_values > _MAX_VALUES:
                problem = f"more than {_MAX_VALUES:,} values once aliases are expanded: use fewer aliases"
                raise _refusal(event, problem)
        elif node:
            self._num_values += 1
            self._sizes[node] = self._num_values - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, because the constructor puts merged keys among a mapping's own.
        node = super().compose_mapping_node(anchor)
        first: dict[Any, int] = {}
        for key, _ in node.value:
            name = self.construct_object(key) if isinstance(key, yaml.ScalarNode) else key
            if name in first:
                raise _refusal(key, f"key {shown(name)} is given twice, first on line {first[name]}: keep one of them")
            first[name] = key.start_mark.line + 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ARG002
        """Build a separate value for each alias, so that overriding one leaves the others unchanged."""
        self.constructed_objects.pop(node, None)
        return super().construct_object(node, deep=True)

    def construct_int(self, node: yaml.ScalarNode) -> int:
        """Return a number. A zero in front does not make it octal, and a colon does not make it a time."""
        if not re.fullmatch(_INT, node.value) or len(node.value) > _MAX_DIGITS:
            raise _refusal(node, "this is not a whole number: give digits, such as 100")
        return int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10)

    def construct_float(self, node: yaml.ScalarNode) -> float:
        """Return a finite number. Nothing in a recipe or a cluster is infinite."""
        number = float(node.value) if re.fullmatch(_FLOAT, node.value) else math.nan
        if not math.isfinite(number):
            raise _refusal(node, "this is not a finite number: give one, or put a text in quotes")
        return number


_MAX_DIGITS = 1000
"""Python refuses to read integers of more than 4,300 digits."""
_MAX_VALUES = 100_000
"""Limit on values after aliases are expanded: nested aliases grow exponentially."""


def _refusal(place: Any, problem: str) -> ConstructorError:
    return ConstructorError(None, None, problem, place.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that YAML 1.1 or 1.2 would read as something else."""


for _name, _pattern, _beginnings in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _beginnings)
_Loader.add_constructor(_TAG + "int", _Loader.construct_int)
_Loader.add_constructor(_TAG + "float", _Loader.construct_float)


def parse_yaml(text: str) -> Any:
    """Parse a YAML text. JSON is YAML, too.

    Raises:
        yaml.YAMLError: the text is not YAML, has a key twice, or a number that is not finite. See ``yaml_problem``.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except RecursionError:
        raise yaml.YAMLError("its sections are nested too deeply") from None


def has_comment(text: str) -> bool:
    """Return whether a comment lies between the tokens of a YAML text that ``parse_yaml`` has read."""
    tokens = yaml.scan(text, Loader=_Loader)
    return any("#" in text[token.end_mark.index : following.start_mark.index] for token, following in pairwise(tokens))


def dump_yaml(value: Any) -> str:
    """Return plain values as a YAML text that ``parse_yaml`` reads back as the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def yaml_problem(error: yaml.YAMLError) -> str:
    """Return what is wrong with a YAML text, and where. Quote none of its lines, because they may hold a secret."""
    match error:
        case yaml.MarkedYAMLError(problem=problem, problem_mark=yaml.Mark(line=line, column=column)):
            return f"line {line + 1}, column {column + 1}: {problem}"
        case yaml.reader.ReaderError():
            return "it has a character that YAML does not allow"
        case _:
            return str(error)
