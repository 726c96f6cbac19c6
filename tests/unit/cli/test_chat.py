"""``rayloom chat`` against a small language model behind uvicorn."""

import io
import os
import pty
import select
import signal
import subprocess
from collections.abc import Callable, Iterator

import openai
import psutil
import pytest
from upath import UPath

from app.cli.main import main
from app.serving.config import DeployedGenerator, EndpointConfig
from tests.generating import generator_config
from tests.helpers import BIN, wait_until
from tests.serving import Server, serving

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def server(generating_storage: UPath) -> Iterator[Server]:
    """One that serves the language model ``writer``."""
    with serving() as started:
        deployed = DeployedGenerator(production=generator_config(generating_storage, 1))
        started.run(started.endpoint.update(EndpointConfig(generators={"writer": deployed})))
        yield started
        started.run(started.endpoint.update(EndpointConfig()))
        started.run(started.endpoint.wait_closed())


@pytest.fixture
def run(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``rayloom chat`` with standard input. Return the exit code, and what it printed on both outputs."""

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["rayloom", "chat", *arguments, "--endpoint", f"http://{server.front}"])
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(str(ended.value.code)), printed.out, printed.err

    return run


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.front}/v1", api_key="none", max_retries=0)


def test_prints_the_answer_of_the_route(run: Run, client: openai.OpenAI) -> None:
    asked = client.chat.completions.create(
        model="writer", messages=[{"role": "user", "content": "def area("}], max_tokens=12, temperature=0
    )
    code, out, err = run("writer", "def area(", "--max-tokens", "12")
    assert (code, err) == (0, "")
    assert out == f"{asked.choices[0].message.content}\n"


def test_a_message_continues_those_before_it_until_a_new_conversation(run: Run) -> None:
    options = ["--max-tokens", "8"]
    _, alone, _ = run("writer", *options, stdin="again\n")
    _, together, _ = run("writer", *options, stdin="first\nagain\n/new\nagain\n/end\nnever\n")
    assert together.endswith(alone)
    assert len(together) > 2 * len(alone)
    assert f"\n{alone}\n{alone}" not in together


def test_completes_a_text_after_the_text_itself(run: Run, client: openai.OpenAI) -> None:
    prompt = "for number in"
    asked = client.completions.create(model="writer", prompt=prompt, max_tokens=9, temperature=0)
    code, out, _ = run("writer", "-", "--complete", "--max-tokens", "9", stdin=prompt)
    assert (code, out) == (0, f"{prompt}{asked.choices[0].text}\n")


@pytest.mark.parametrize("options", [["--complete"], []])
def test_stop_texts_end_an_answer_before_them(run: Run, options: list[str]) -> None:
    options = [*options, "--max-tokens", "20"]
    _, whole, _ = run("writer", "def area(", *options)
    answer = whole.removeprefix("def area(" if "--complete" in options else "").rstrip("\n")
    stop = answer[6:9]
    code, out, _ = run("writer", "def area(", *options, "--stop", "never said", "--stop", stop)
    assert (code, out) == (0, f"{whole[: whole.index(stop)]}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["writter", "Hello"], "'writter' is not deployed: deployed are writer"),
        (["writer", "  "], "the text '  ' is empty"),
        (["writer", "Hello", "--max-tokens", "4000"], "max_tokens is 4000"),
        (["writer", "x", "--complete", "--system", "y"], "--complete"),
        (["writer", "x", "--temperature", "3"], "--temperature"),
        (["writer", "x", "--stop", ""], "stop has a text of 0 characters: expected 1 to 1000"),
        (["writer", "x", *["--stop", "y"] * 17], "expected a text or 16 or fewer of them"),
    ],
)
def test_a_mistake_is_one_sentence(run: Run, arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert said in err
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_the_answer_and_not_the_conversation(server: Server) -> None:
    ours, theirs = pty.openpty()
    command = [str(BIN / "rayloom"), "chat", "writer", "--endpoint", f"http://{server.front}"]
    shown = b""

    def read_until(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            assert select.select([ours], [], [], 60)[0], shown
            shown += os.read(ours, 1024)

    engines = [
        child for child in psutil.Process().children(recursive=True) if "engines.generation" in str(child.cmdline())
    ]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        try:
            read_until(b"> ")
            for engine in engines:
                engine.suspend()  # so that the answer does not end before it is stopped
            os.write(ours, b"tell me everything\n")
            read_until(b"everything\r\n")
            wait_until(lambda: _in_flight(server) == 1)
            # Python does not see a signal that comes just as it begins to wait for the socket. People press it again.
            for _ in range(3):
                process.send_signal(signal.SIGINT)
                if select.select([ours], [], [], 10)[0]:
                    break
            read_until("…".encode())
            wait_until(lambda: _in_flight(server) == 0)
            for engine in engines:
                engine.resume()
            shown = b""
            os.write(ours, b"go on\n/end\n")
            assert process.wait(60) == 0
            read_until(b"go on")
            assert b"error" not in shown
        finally:
            for engine in engines:
                engine.resume()
            process.kill()
    assert engines


def _in_flight(server: Server) -> int:
    return server.endpoint.generators["writer"].find(None).in_flight
