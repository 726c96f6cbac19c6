"""The page at ``/``, in a browser: what it shows, what it asks, and that nothing but its own script runs in it."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import onnx.parser
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from upath import UPath

from app.config import DataConfig, ImageConfig
from app.data.images import ImageProcessor, encode_png
from app.engines.base import Signature
from app.serving.access import Access
from app.serving.config import CandidateConfig, DeployedModel, EndpointConfig
from app.serving.transport.routes import PAGE
from app.tensors import OUTPUT, TensorSpec
from tests.browser import dark, screen, seen, whole_picture
from tests.engine_contract import PROCESSOR, SIGNATURE, exported
from tests.serving import Server, serving
from tests.toy import publish_version, version_config

TOKEN = "t" * 32
CLEAR, DARK = "rgba(0, 0, 0, 0)", "rgb(28, 32, 34)"
LABELS = ["bad", "neither", "<img src=x onerror=document.body.remove()>"]
BRIGHTNESS = """
<ir_version: 10, opset_import: ["": 20]>
brightness (float[rows, 1, 8, 8] pixel_values) => (float[rows, 2] logits) {
    pixels = Flatten (pixel_values)
    axes = Constant <value_ints = [1]> ()
    bright = ReduceMean <keepdims = 1> (pixels, axes)
    dark = Neg (bright)
    logits = Concat <axis = 1> (dark, bright)
}
"""
"""A model of pictures that tells the dark from the bright."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EndpointConfig:
    """A model of texts and one of pictures."""
    storage = UPath(tmp_path_factory.mktemp("page"))
    for _ in range(2):
        publish_version(storage, "reviews", exported(), SIGNATURE, PROCESSOR, LABELS)
    pictures = ImageProcessor.fit([], DataConfig(source="-", image=ImageConfig(size=8, channels=1)))
    signature = Signature(pictures.inputs, (TensorSpec(OUTPUT, np.dtype(np.float32), (-1, 2)),))
    brightness = onnx.parser.parse_model(BRIGHTNESS).SerializeToString()
    publish_version(storage, "shades", brightness, signature, pictures, ["dark", "bright"])
    names = ("reviews", "shades")
    return EndpointConfig(models={name: DeployedModel(production=version_config(storage, 1, name)) for name in names})


@pytest.fixture(scope="module")
def server(config: EndpointConfig) -> Iterator[Server]:
    with serving() as started:
        started.run(started.endpoint.update(config))
        yield started


@pytest.fixture
def page(server: Server, browser: WebDriver) -> WebDriver:
    """Opened in a tab that knows no token."""
    browser.get(f"http://{server.http}/")
    browser.execute_script("sessionStorage.clear()")
    browser.refresh()
    return browser


@pytest.fixture
def locked(server: Server, config: EndpointConfig) -> Iterator[None]:
    """While the endpoint asks for a token."""
    server.run(server.endpoint.update(config.model_copy(update={"access": Access.by_token(TOKEN)})))
    yield
    server.run(server.endpoint.update(config))


def test_it_lists_models_with_what_they_take_answer_and_have_done(page: WebDriver, server: Server) -> None:
    httpx.post(f"http://{server.http}/v1/models/reviews/predict", json={"inputs": "good"}).raise_for_status()
    card = seen(page, "#models article:nth-child(1)", "ready").text
    assert card.startswith("reviews\nversion 1")
    assert "Takes a text; answers bad, neither, <img src=x" in card
    assert "Takes an image; answers dark, bright." in seen(page, "#models article:nth-child(2)").text
    page.refresh()
    each = seen(page, "#models article:nth-child(1) dl", "ms").find_elements(By.TAG_NAME, "div")
    figures = {one.find_element(By.TAG_NAME, "dt").text: one.find_element(By.TAG_NAME, "dd").text for one in each}
    assert int(figures["Requests"]) >= 1
    assert figures["Failed"] == "0"
    invalid, requests = int(figures["Invalid"]), int(figures["Requests"])
    for body in ({"inputs": []}, {"input": "good"}):
        assert httpx.post(f"http://{server.http}/v1/models/reviews/predict", json=body).status_code == 400
    page.refresh()
    shown = seen(page, "#models article:nth-child(1) dl", "ms").text.split("\n")
    assert shown[:6] == ["Requests", str(requests + 2), "Invalid", str(invalid + 2), "Failed", "0"]
    assert not page.find_elements(By.CSS_SELECTOR, "#models dd.bad")
    assert figures["Mean latency"].endswith(" ms")


def test_a_version_that_is_tried_is_shown_and_not_asked_by_name(
    page: WebDriver, server: Server, config: EndpointConfig
) -> None:
    production = config.models["reviews"].production
    canary = CandidateConfig(version=version_config(UPath(production.storage), 2, "reviews"), percent=10)
    tried = {**config.models, "reviews": DeployedModel(production=production, canary=canary)}
    server.run(server.endpoint.update(EndpointConfig(models=tried)))
    try:
        card = seen(page, "#models article:nth-child(2)", "canary")
        assert "version 2 ready: canary, 10 %" in " ".join(card.text.split())
        assert not card.find_elements(By.TAG_NAME, "button")
        assert [option.text for option in Select(seen(page, "#model")).options] == ["reviews", "shades"]
    finally:
        server.run(server.endpoint.update(config))


def test_a_text_is_answered_with_a_bar_for_each_label(page: WebDriver, server: Server) -> None:
    seen(page, "#text").send_keys("a good book")
    seen(page, "#ask").click()
    asked = httpx.post(f"http://{server.http}/v1/models/reviews/predict", json={"inputs": "a good book"})
    (prediction,) = asked.json()["predictions"]
    assert seen(page, "#answer h3").text == f"{prediction['label']}, {prediction['scores'][prediction['label']]:.1%}"
    rows = page.find_elements(By.CSS_SELECTOR, "#answer tr")
    best_first = sorted(prediction["scores"], key=prediction["scores"].__getitem__, reverse=True)
    assert [row.find_element(By.TAG_NAME, "th").text for row in rows] == best_first
    widths = [row.find_element(By.CSS_SELECTOR, ".bar span").size["width"] for row in rows]
    assert widths == sorted(widths, reverse=True)
    assert "reviews, version 1, answered in" in seen(page, "#answer").text


def test_an_image_is_answered_and_what_is_none_is_refused_in_the_servers_words(page: WebDriver, tmp_path: Path) -> None:
    seen(page, "#models article:nth-child(2) button").click()
    assert page.switch_to.active_element.get_attribute("id") == "image"
    (tmp_path / "white.png").write_bytes(encode_png(np.full((8, 8), 250, np.uint8)))
    seen(page, "#image").send_keys(str(tmp_path / "white.png"))
    assert seen(page, "#preview").size["height"] > 0
    seen(page, "#ask").click()
    assert seen(page, "#answer h3").text.startswith("bright, ")
    (tmp_path / "words.png").write_text("no picture", encoding="utf-8")
    page.find_element(By.ID, "image").send_keys(str(tmp_path / "words.png"))
    seen(page, "#ask").click()
    assert seen(page, "#answer .error").text == "400: an image of 10 bytes cannot be read: expected a PNG or JPEG file"


def test_a_token_is_asked_for_kept_in_the_tab_and_forgotten(page: WebDriver, locked: None) -> None:
    page.refresh()
    field = seen(page, "#token")
    assert page.switch_to.active_element == field
    assert not page.find_element(By.ID, "models").is_displayed()
    field.send_keys("wrong", Keys.ENTER)
    seen(page, "#refusal", "401: that is not this endpoint's token")
    field.send_keys(TOKEN, Keys.ENTER)
    seen(page, "#models article")
    page.refresh()
    seen(page, "#models article")
    seen(page, "#text").send_keys("good")
    seen(page, "#ask").click()
    seen(page, "#answer h3")
    assert TOKEN not in page.page_source + page.current_url
    seen(page, "#forget").click()
    seen(page, "#token")
    assert page.execute_script("return sessionStorage.length + localStorage.length + document.cookie.length") == 0


def test_it_is_used_by_keyboard_alone(page: WebDriver) -> None:
    seen(page, "#models article")
    visited: list[str] = []
    while "ask" not in visited:
        webdriver.ActionChains(page).send_keys(Keys.TAB).perform()
        visited.append(page.switch_to.active_element.get_attribute("id") or page.switch_to.active_element.text)
        assert len(visited) < 20, visited
        outline = page.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", visited
    assert [item for item in visited if item in ("API", "model", "text", "ask")] == ["API", "model", "text", "ask"]
    seen(page, "#text").send_keys("bad", Keys.CONTROL, Keys.ENTER)
    seen(page, "#answer h3")


def test_a_screen_reader_hears_what_everything_is(page: WebDriver) -> None:
    seen(page, "#models article")
    Select(page.find_element(By.ID, "model")).select_by_value("shades")
    controls = page.find_elements(By.CSS_SELECTOR, "a, button, input, select, textarea, section, article")
    named = [control for control in controls if control.is_displayed() and control.tag_name != "article"]
    assert {item.tag_name for item in named} >= {"a", "button", "input", "select", "section"}
    assert all(item.accessible_name for item in named), [item.get_attribute("outerHTML") for item in named]
    assert seen(page, "#models article:nth-child(2) button").accessible_name == "Try it shades"
    assert page.find_element(By.ID, "answer").get_attribute("aria-live") == "polite"


def test_nothing_is_fetched_from_elsewhere_and_nothing_runs_but_the_pages_script(
    page: WebDriver, server: Server
) -> None:
    seen(page, "#models article", "<img src=x")
    fetched = page.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert fetched
    assert all(item.startswith(f"http://{server.http}/") for item in fetched)
    page.get_log("browser")
    page.execute_script("document.body.append(Object.assign(document.createElement('script'), {text: 'ran = 1'}))")
    assert page.execute_script("return self.ran") is None
    assert "Content Security Policy" in str(page.get_log("browser"))


def test_the_page_is_narrow_where_the_screen_is(page: WebDriver) -> None:
    size = page.get_window_size()
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    )
    seen(page, "#models article")
    assert page.execute_script("return document.documentElement.scrollWidth") == 390
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert page.get_window_size() == size


def test_the_page_is_one_file_with_a_strict_policy(server: Server) -> None:
    answer = httpx.get(f"http://{server.http}/")
    assert answer.text == PAGE
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert all(re.fullmatch(r"'sha256-.{44}'", policy[kind]) for kind in ("script-src", "style-src"))
    assert not re.search(r"https?://|\son\w+=|\sstyle=|innerHTML", PAGE)


@pytest.mark.parametrize(("level", "label"), [(0, "dark"), (255, "bright")])
def test_an_image_is_sent_as_it_is_too(server: Server, level: int, label: str) -> None:
    content, kind = encode_png(np.full((8, 8), level, np.uint8)), {"content-type": "image/png"}
    url = f"http://{server.http}/v1/models"
    answer = httpx.post(f"{url}/shades/predict", content=content, headers=kind)
    assert [item["label"] for item in answer.json()["predictions"]] == [label]
    for model, refused, words in [("shades", content[:-30], "cannot be read"), ("reviews", content, "expected a text")]:
        answer = httpx.post(f"{url}/{model}/predict", content=refused, headers=kind)
        assert answer.status_code == 400
        assert words in answer.json()["error"]


def test_the_api_is_described_and_tried_with_nothing_from_other_servers(
    page: WebDriver, server: Server, locked: None
) -> None:
    page.get(f"http://{server.http}/docs")
    seen(page, "#operations-models-infer_name .authorization__btn")
    asked = page.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert asked
    assert all(item.startswith((f"http://{server.http}/", "data:")) for item in asked), asked
    seen(page, ".authorize").click()
    seen(page, "#auth-bearer-value").send_keys(TOKEN, Keys.ENTER)
    seen(page, ".close-modal, .btn-done").click()
    seen(page, "[id$='models_v1_predict_get'] .opblock-summary-control").click()
    seen(page, ".try-out__btn").click()
    seen(page, ".execute").click()
    assert '"reviews"' in seen(page, ".live-responses-table .response-col_description", "reviews").text


def test_the_description_of_the_api_is_dark_where_the_reader_is_and_shows_locks_only_with_a_token(
    page: WebDriver, server: Server
) -> None:
    page.get_log("browser")
    page.get(f"http://{server.http}/docs")
    seen(page, "#operations-models-infer_name", "/v2/models/{name}/infer")
    assert seen(page, "#operations-OpenAI-chat_completions .opblock-summary-description").text == "Chat Completions"
    assert not page.find_elements(By.CSS_SELECTOR, ".authorize, .authorization__btn")
    for width in (1400, 390):
        with screen(page, width):
            whole_picture(page, f"docs-{width}-False")
            assert page.execute_script("return document.documentElement.scrollWidth") == width
            assert page.execute_script("return getComputedStyle(document.documentElement).backgroundColor") == CLEAR
            with dark(page):
                assert page.execute_script("return getComputedStyle(document.documentElement).backgroundColor") == DARK
                whole_picture(page, f"docs-{width}-True")
    assert page.get_log("browser") == []
    page.execute_script("document.body.append(Object.assign(document.createElement('script'), {text: 'ran = 1'}))")
    assert page.execute_script("return self.ran") is None, "nothing runs but what the server has"


def test_the_description_of_the_api_has_a_strict_policy(server: Server) -> None:
    answer = httpx.get(f"http://{server.http}/docs")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert re.fullmatch(r"'self' 'sha256-.{44}'", policy["script-src"])
    assert policy["style-src"] == policy["connect-src"] == "'self'"
