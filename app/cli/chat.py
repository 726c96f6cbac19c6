"""The command that talks to a deployed language model."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.endpoint import TOKEN_FILE_VARIABLE, EndpointClient, local_endpoint, named_endpoint
from app.cli.predict import require_text
from app.cluster.state import running_cluster
from app.errors import RayloomError, RequestError

_NEW, _END = "/new", "/end"
_HELP = f"Ctrl-C stops an answer, {_NEW} begins a new conversation, {_END} or Ctrl-D ends."


def chat(
    model: str,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Messages, sent one after the other. - is standard input. Default: ask for each."),
    ] = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Continue each text, for a model that was not trained on chats.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="A message that tells the model how to answer.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer. Default: the endpoint's.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="0: always the most probable token. Higher values vary more.")
    ] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends an answer, and is not part of it. May be repeated.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats an answer whose temperature is above 0.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Default: the local cluster's.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(envvar=TOKEN_FILE_VARIABLE, help="Default: the local cluster's own."),
    ] = None,
) -> None:
    """Talk to a deployed language model. Answers appear as they are generated."""
    if complete and system:
        raise RequestError("--system is a message of a chat, and --complete continues texts: leave one of them out").of(
            "options.contradict", "--system"
        )
    client = named_endpoint(endpoint, token_file) if endpoint else local_endpoint(running_cluster(), token_file)
    given = {"max_tokens": max_tokens, "temperature": temperature, "stop": stop, "seed": seed}
    options = {"model": model, **{name: value for name, value in given.items() if value is not None}}
    speaker = _Completion(client, options) if complete else _Conversation(client, options, system)
    if texts:
        for text in _read(texts):
            speaker.say(text)
    else:
        _ask_again_and_again(speaker)


def _read(texts: list[str]) -> Iterator[str]:
    for text in texts:
        yield require_text(sys.stdin.read() if text == "-" else text, f"the text {text!r}")


class _Completion:
    """Continues each text on its own."""

    def __init__(self, client: EndpointClient, options: dict[str, Any]) -> None:
        self._client, self._options = client, options

    def forget(self) -> None:
        """Do nothing: no text depends on earlier ones."""

    def say(self, text: str) -> None:
        """Print the text with its continuation, as it comes. Ctrl-C stops it."""
        print(text, end="", flush=True)
        _printed(self._client.stream("completions", {**self._options, "prompt": text}))


class _Conversation:
    """A conversation, in which each message continues the earlier ones."""

    def __init__(self, client: EndpointClient, options: dict[str, Any], system: str | None) -> None:
        self._client, self._options = client, options
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def forget(self) -> None:
        """Begin a new conversation."""
        self._messages = list(self._opening)

    def say(self, text: str) -> None:
        """Send a message, and print the answer as it comes. Ctrl-C stops it. A refused message is forgotten."""
        messages = [*self._messages, {"role": "user", "content": text}]
        answer = _printed(self._client.stream("chat/completions", {**self._options, "messages": messages}))
        self._messages = [*messages, {"role": "assistant", "content": answer}]


def _printed(parts: Iterator[str]) -> str:
    """Print the parts of an answer as they come, and return it. After Ctrl-C, return the parts so far."""
    answer = ""
    try:
        for part in parts:
            answer += part
            print(part, end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    print(flush=True)
    return answer


def _ask_again_and_again(speaker: _Completion | _Conversation) -> None:
    """Read messages from standard input until it ends. An error is shown, and the next message is read."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(_HELP)
    while True:
        try:
            text = input("> " if is_terminal else "")
        except EOFError:
            break
        except KeyboardInterrupt:
            print()
            break
        if text.strip() == _END:
            break
        if text.strip() == _NEW:
            speaker.forget()
        elif text.strip():
            try:
                speaker.say(text)
            except RayloomError as error:
                if not is_terminal:
                    raise
                print(f"error: {error}", file=sys.stderr)
