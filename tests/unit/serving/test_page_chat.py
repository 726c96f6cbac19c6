"""Language models on the page at ``/``, in a browser: streamed answers, which are those of the routes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from upath import UPath

from app.serving.config import DeployedGenerator, DeployedModel, EndpointConfig
from tests.browser import dark, screen, seen, whole_picture
from tests.engine_contract import exported
from tests.generating import export_language_model, generator_config, make_language_model, publish_language_model
from tests.helpers import wait_until
from tests.serving import Server, serving
from tests.toy import publish, version_config

LENGTH = 4096
"""Of the model without a template, so that its answers take seconds."""


@pytest.fixture(scope="module")
def server(language_model: Path, exported_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With ``writer``, which chats, ``completer``, which has no chat template, and ``toy``, which classifies."""
    folder = tmp_path_factory.mktemp("page_chat")
    storage = UPath(folder / "storage")
    publish_language_model(storage, "writer", language_model, exported_model)
    source = make_language_model(folder / "source", length=LENGTH, has_template=False)
    publish_language_model(storage, "completer", source, export_language_model(source, folder / "exported"))
    publish(storage, exported())
    names = ("completer", "writer")
    generators = {name: DeployedGenerator(production=generator_config(storage, 1, name)) for name in names}
    toy = DeployedModel(production=version_config(storage, 1))
    with serving() as started:
        started.run(started.endpoint.update(EndpointConfig(generators=generators).serving("toy", toy)))
        yield started
        started.run(started.endpoint.update(EndpointConfig()))
        started.run(started.endpoint.wait_closed())


@pytest.fixture
def page(server: Server, browser: WebDriver) -> WebDriver:
    browser.get("about:blank")
    browser.get_log("browser")  # type: ignore[no-untyped-call]
    browser.get(f"http://{server.http}/")
    seen(browser, "#models article", "writer")
    return browser


def choose(page: WebDriver, name: str, max_tokens: int) -> None:
    Select(seen(page, "#model")).select_by_value(name)
    field = seen(page, "#max-tokens")
    field.clear()
    field.send_keys(str(max_tokens))


def say(page: WebDriver, *keys: str) -> None:
    seen(page, "#message").send_keys(*keys, Keys.ENTER)


def text_of(page: WebDriver, turn: int = -1) -> Any:
    return page.execute_script(
        "return [...document.querySelectorAll('#turns .said')].at(arguments[0]).textContent", turn
    )


def answered_text(page: WebDriver, answers: int = 1) -> Any:
    seen(page, f"#turns li.answer:nth-of-type({2 * answers})", "complete after")
    return text_of(page)


def test_a_chat_streams_what_curl_and_python_get(page: WebDriver, server: Server) -> None:
    choose(page, "writer", 20)
    say(page, "def area(", Keys.SHIFT + Keys.ENTER + Keys.NULL, "width")
    first = answered_text(page)
    asked: dict[str, Any] = {"model": "writer", "max_tokens": 20, "temperature": 0}
    user = {"role": "user", "content": "def area(\nwidth"}
    url = f"http://{server.http}/v1"
    whole = httpx.post(f"{url}/chat/completions", json={**asked, "messages": [user]}).json()
    assert first == whole["choices"][0]["message"]["content"]
    assert "writer, version 1, " in seen(page, "#turns .answer").text
    say(page, "it's '好'")
    second = answered_text(page, 2)
    turns: Any = [user, {"role": "assistant", "content": first}, {"role": "user", "content": "it's '好'"}]
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    stream = client.chat.completions.create(**asked, messages=turns, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == second
    for summary in page.find_elements(By.CSS_SELECTOR, "#same summary"):
        summary.click()
    command = subprocess.run(seen(page, "#curl").text, shell=True, capture_output=True, check=True)
    assert json.loads(command.stdout)["choices"][0]["message"]["content"] == second
    program = page.execute_script("return document.getElementById('python').textContent")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env={"PYTHONUTF8": "1"})
    assert ran.stdout.decode() == second
    assert page.get_log("browser") == []  # type: ignore[no-untyped-call]


def test_a_text_is_continued_where_there_is_no_chat_template(page: WebDriver, server: Server) -> None:
    choose(page, "completer", 12)
    assert seen(page, "#send").text == "Continue"
    say(page, "for number in")
    seen(page, "#turns .answer", "12 written")
    asked = {"model": "completer", "prompt": "for number in", "max_tokens": 12, "temperature": 0}
    choice = httpx.post(f"http://{server.http}/v1/completions", json=asked).json()["choices"][0]
    assert text_of(page) == "for number in" + choice["text"]
    assert "cut at its maximum of tokens" in seen(page, "#turns .answer").text
    seen(page, "#same summary").click()
    assert "/v1/completions' -d" in seen(page, "#curl").text
    seen(page, "#new").click()
    assert not page.find_elements(By.CSS_SELECTOR, "#turns li")


def test_stop_keeps_what_has_come_and_frees_the_place(page: WebDriver, server: Server) -> None:
    generator = server.endpoint.generators["completer"].find(None)
    choose(page, "completer", LENGTH - 50)
    engine = psutil.Process(generator.engine.pid)  # type: ignore[attr-defined] # of the engine in a process
    try:
        for _ in range(20):
            say(page, "for number in")
            wait_until(lambda: len(text_of(page)) > len("for number in"))
            engine.suspend()  # so that the answer does not end before it is stopped
            if generator.in_flight:
                break
            engine.resume()  # it had ended before
            seen(page, "#new").click()
        stop = seen(page, "#stop")
        assert not page.find_element(By.ID, "send").is_displayed()
        stop.click()
        wait_until(lambda: not generator.in_flight and not generator.engine_statistics.running)
    finally:
        engine.resume()
    assert "stopped" in seen(page, "#turns .answer", "stopped").text
    assert not page.find_element(By.ID, "stop").is_displayed()
    kept = text_of(page)
    choose(page, "completer", 5)
    say(page, "import")
    seen(page, "#turns .answer:nth-child(2)", "5 written")
    assert text_of(page, 0) == kept


def test_buttons_stay_in_place_while_a_long_answer_comes(page: WebDriver, server: Server) -> None:
    generator = server.endpoint.generators["completer"].find(None)
    engine = psutil.Process(generator.engine.pid)  # type: ignore[attr-defined] # only an engine in a process has one
    choose(page, "completer", LENGTH - 50)
    say(page, "for number in")
    wait_until(lambda: len(text_of(page)) > len("for number in"))
    place = seen(page, "#stop").location
    try:
        while len(text_of(page)) < 2000:  # the list of answers scrolls
            engine.resume()
            time.sleep(0.1)
            engine.suspend()  # so that the answer is incomplete while the page is checked
        assert seen(page, "#stop").location == place
    finally:
        engine.resume()
    seen(page, "#new").click()


def test_a_new_conversation_or_another_model_ends_the_answer_that_comes(page: WebDriver, server: Server) -> None:
    generator = server.endpoint.generators["completer"].find(None)
    choose(page, "completer", LENGTH - 50)
    for leaves_model in (False, True):
        say(page, "for number in")
        wait_until(lambda: generator.in_flight > 0)
        if leaves_model:
            Select(seen(page, "#model")).select_by_value("writer")
        else:
            seen(page, "#new").click()
        wait_until(lambda: not generator.in_flight)
        assert not page.find_elements(By.CSS_SELECTOR, "#turns li")
        assert seen(page, "#send").is_displayed()
    Select(seen(page, "#model")).select_by_value("toy")
    assert seen(page, "#ask").is_displayed()
    assert not page.find_element(By.ID, "talk").is_displayed()


def test_a_refused_message_is_given_back_with_the_sentence_of_the_endpoint(page: WebDriver, server: Server) -> None:
    choose(page, "writer", 5000)
    say(page, "Hello")
    asked = {"model": "writer", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5000}
    refused = httpx.post(f"http://{server.http}/v1/chat/completions", json=asked)
    assert seen(page, "#refused").text == f"400: {refused.json()['error']['message']}"
    assert seen(page, "#message").get_attribute("value") == "Hello"
    assert not page.find_elements(By.CSS_SELECTOR, "#turns li")
    choose(page, "writer", 5)
    say(page, "")
    assert answered_text(page)
    assert not page.find_element(By.ID, "refused").is_displayed()


def test_a_language_models_card_says_its_length_and_counts_tokens(page: WebDriver, server: Server) -> None:
    card = seen(page, "#models article:nth-child(3)")
    assert "Answers chats and continues texts, up to 128 tokens with the prompt." in card.text
    assert "Continues texts, up to 4,096 tokens" in seen(page, "#models article:nth-child(1)").text
    card.find_element(By.TAG_NAME, "button").click()
    assert page.switch_to.active_element.get_attribute("id") == "message"
    choose(page, "writer", 5)
    say(page, "Hello")
    answered_text(page)
    stats = httpx.get(f"http://{server.http}/v2/models/writer/stats").json()["model_stats"][0]["generation"]
    assert stats["generated_tokens"] >= 5
    assert (stats["running"], stats["waiting"]) == (0, 0)
    figures = seen(page, "#models article:nth-child(3) dl", "ms").text.split("\n")
    shown = dict(zip(figures[::2], figures[1::2], strict=True))
    assert list(shown) == [
        "Requests", "Invalid", "Failed", "Tokens read", "Tokens written", "Running", "Waiting", "First token",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [1400, 390])
def test_a_conversation_fits_the_screen(page: WebDriver, server: Server, width: int) -> None:
    with screen(page, width):
        page.refresh()
        seen(page, "#models article", "writer")
        choose(page, "writer", 40)
        say(page, "What does this function do? " * 2)
        answered_text(page)
        for summary in page.find_elements(By.CSS_SELECTOR, "#same summary"):
            summary.click()
        assert page.execute_script("return document.documentElement.scrollWidth") == width
        controls = page.find_elements(By.CSS_SELECTOR, "#talk button, #talk input, #talk textarea, #talk summary")
        assert all(item.accessible_name for item in controls if item.is_displayed())
        whole_picture(page, f"chat-{width}")
        with dark(page):
            whole_picture(page, f"chat-{width}-dark")
