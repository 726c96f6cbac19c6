"""Chat templates, rendered as by transformers. They come with third-party models, so they run in Jinja's sandbox."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from app.data.turns import with_reasoning
from app.errors import EngineError, RequestError, first_line

Message = Mapping[str, Any]
"""A turn as JSON. The template determines its keys."""
Tool = Mapping[str, Any]


class ChatTemplate:
    """A template that writes messages as one text."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Compile a template.

        Args:
            source: the template.
            variables: the named special tokens, such as ``bos_token``.

        Raises:
            EngineError: it is not a Jinja template.
        """
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise EngineError(
                f"the chat template cannot be read ({first_line(error)}): correct it, and publish the model again"
            ).of("chat.template") from error
        self._variables = variables
        literals = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
        literals |= {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        self.literals = "\0".join(sorted(literals))
        """All texts that the template itself contains."""
        self.reads_tools = "tools" in jinja2.meta.find_undeclared_variables(tree)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> str:
        """Return the text of messages, up to the beginning of the answer.

        Raises:
            RequestError: the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self._variables,
            )
        except Exception as error:  # a template may raise anything
            raise RequestError(
                f"the model's chat template refuses the messages ({first_line(error)}): give the roles and the "
                "content that it expects"
            ).of("chat.template", "messages") from error


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks the assistant's turns for training. Here it does nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` without private attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # ``self`` may be an attribute
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no private attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
