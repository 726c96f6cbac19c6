"""What tests assert of an error: its rule and its key. ``wording.json`` holds the sentences of each test.

Each test compares the sentences of its own errors, so any selection and any number of test processes will do.
``pytest --update-wording`` writes the entries of the tests that pass.
"""

import fcntl
import json
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from tempfile import gettempdir
from traceback import walk_tb

import pytest

from app.errors import RayloomError, first_line

_FILE = Path(__file__).with_suffix(".json")
_ROOT = _FILE.parents[1]
_OF_THIS_RUN = {
    re.escape(str(_ROOT)): "ROOT",  # first: a checkout may lie in the folder for temporary files
    rf"({gettempdir()}|/dev/shm)/((pytest-of-\w+/pytest-\d+|rayloom-tests-\w+)/(popen-gw\d+/)?)?[\w-]+": "TMP",
    r"(127\.0\.0\.1|localhost|\[::1\]):\d{4,5}": r"\1:PORT",
    r"-[0-9a-f]{8}\b": "",  # of a job or a bucket
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d": "TIME",
    r"[0-9a-f]{12}…|\b[0-9a-f]{64}\b": "SHA256",
    rf"\b{re.escape(gethostname())}\b": "HOST",
    "0x[0-9a-f]{8,}": "ADDRESS",
    r"('127\.0\.0\.1', )\d+": r"\1PORT",
    r"\b[\d,]+ bytes are free": "BYTES are free",
    r"(waited for|answered within) [\d.]+ s\b": r"\1 SECONDS",
    r"\d{8}-\d{6}-(\w+)-[0-9a-f]{4}": r"RUN-\1",
}
"""What differs from run to run, by pattern."""
_WORDING: dict[str, dict[str, str]] = json.loads(_FILE.read_text(encoding="utf-8"))
"""The sentences of each test, by file and test."""
_sentences: list[str] = []
"""Of the test that runs."""
_collected: dict[str, set[str]] = {}
"""The tests of each file, before any is deselected."""
_updates: dict[str, dict[str, str]] = {}


@contextmanager
def refused(rule: str, key: str | None = None) -> Iterator[pytest.ExceptionInfo[RayloomError]]:
    """Expect an error of this rule and key. Its class and its sentence must be those of ``wording.json``."""
    with pytest.raises(RayloomError) as caught:
        yield caught
    error = caught.value
    assert (error.rule, error.key) == (rule, key), str(error)
    _sentences.append(f"{type(error).__name__}: {_without_foreign_words(error)}")


def stale_entries() -> list[str]:
    """Return the entries of tests that are gone, as far as their files were collected."""
    return [f"{file}::{test}" for file, tests in _WORDING.items() for test in tests if _is_gone(file, test)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-wording", action="store_true", help="write the sentences of errors to wording.json")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note what there is to run, unless single tests are named."""
    if not any("::" in argument for argument in config.args):
        for item in items:
            _collected.setdefault(item.location[0], set()).add(item.location[2])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    _sentences.clear()
    result = yield
    file, _, test = item.location
    said = "\n".join(dict.fromkeys(_sentences))
    if item.config.getoption("--update-wording"):
        _updates.setdefault(file, {})[test] = said
    else:
        known = _WORDING.get(file, {}).get(test, "")
        assert said.splitlines() == known.splitlines(), "a sentence changed; --update-wording notes the new one"
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Merge what this process saw into the file, as other test processes do."""
    if not session.config.getoption("--update-wording"):
        return
    with _FILE.open("r+", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        wording = json.load(stream)
        for file, tests in _updates.items():
            wording.setdefault(file, {}).update(tests)
        kept = {
            file: {test: said for test, said in tests.items() if said and not _is_gone(file, test)}
            for file, tests in wording.items()
        }
        stream.seek(0)
        stream.truncate()
        json.dump(
            {file: tests for file, tests in kept.items() if tests}, stream, indent=1, sort_keys=True, ensure_ascii=False
        )
        stream.write("\n")


def _is_gone(file: str, test: str) -> bool:
    return test not in _collected[file] if file in _collected else not (_ROOT / file).exists()


def _without_foreign_words(error: BaseException) -> str:
    """Return an error's message without the words of libraries, which change with their versions, and of this run."""
    text = str(error)
    cause: BaseException | None = error
    while cause := cause.__cause__ or cause.__context__:
        raised_in = [frame.f_code.co_filename for frame, _ in walk_tb(cause.__traceback__)][-1:]
        for words in (str(cause), first_line(cause)):
            if " " in words and not any(file.startswith(str(_ROOT / "app")) for file in raised_in):
                text = text.replace(words, f"<{type(cause).__name__}>")
    for pattern, stand_in in _OF_THIS_RUN.items():
        text = re.sub(pattern, stand_in, text)
    return text
