"""A person finds out from the pages alone why a run was slow, and why a version is worse.

``RAYLOOM_SCREENSHOTS=docs/images`` writes the pictures of docs/how-to/find_a_cause.md and watch_a_cluster.md anew.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait
from sklearn.datasets import load_digits
from upath import UPath

from app.data.images import encode_png
from tests.browser import picture, seen, started_browser
from tests.helpers import local_cluster, run
from tests.jobs import run_job
from tests.launch import Cluster, Launch
from tests.unit.reports.test_ui import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.debian("prometheus", "prometheus-alertmanager", "prometheus-node-exporter"),
]
DIFFERENCES, RESULTS = "[aria-label='Differences of the recipes']", "[aria-label='Results']"
"""The tables of a comparison."""
DIGITS = ["recipes/digits.yaml", "train.early_stopping=null", "tune=null"]
ENDLESS = [
    "name=uneven",
    "train.epochs=400",
    "model.factory=tests.faults.models:SlowCnn",
    "model.args={width: 32, rank: 1, extra_s: 0.4}",
]


@pytest.fixture(scope="module")
def watched(home: Path) -> Iterator[dict[str, str]]:
    with local_cluster(home / "causes", "--monitoring", "--num-cpus=6") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    with started_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def ui(watched: dict[str, str]) -> Iterator[str]:
    """The address of ``rayloom ui``."""
    with served(UPath(watched["RAYLOOM_STORAGE"])) as url:
        yield url


def rows(page: WebDriver, css: str) -> dict[str, list[str]]:
    """Return the other cells of each row of a table, by the row's first cell."""
    found = seen(page, f"{css} tbody").find_elements(By.TAG_NAME, "tr")
    cells = [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in found]
    return {first: rest for first, *rest in cells}


def compare(page: WebDriver, ui: str, *run_ids: str) -> None:
    """Mark runs in the list, and open their comparison."""
    page.get(ui)
    for run_id in run_ids:
        seen(page, f"[aria-label='Compare train/{run_id}']").click()
    seen(page, "#compare button").click()
    seen(page, RESULTS, "val_loss")


def legend(page: WebDriver, title: str, line: str, about: str = "") -> str:
    """Return the newest value of the line of a panel whose name begins and contains this, once it is drawn."""
    path = f"//figure[figcaption='{title}']//li[starts-with(span, '{line}') and contains(span, '{about}')]/b"
    return str(WebDriverWait(page, 60.0, 0.2, [Exception]).until(lambda page: page.find_element(By.XPATH, path).text))


def write_pictures(folder: Path, scale: int) -> str:
    """Write 400 digits as pictures of ``8 * scale`` pixels a side, one folder for each label."""
    examples = load_digits()
    for number, (image, label) in enumerate(zip(examples.images[:400], examples.target[:400], strict=True)):
        file = folder / str(label) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encode_png(np.kron((image * (255 / 16)).astype(np.uint8), np.ones((scale, scale), np.uint8))))
    return str(folder)


def test_a_data_stall_is_found_by_comparing_two_runs(
    watched: dict[str, str], ui: str, browser: WebDriver, home: Path
) -> None:
    sources = [write_pictures(home / "small", 1), write_pictures(home / "full_size", 64)]
    usual, slow = (
        run_job(watched, "train", *DIGITS, f"data.source={source}", "train.epochs=8")["run_id"] for source in sources
    )
    compare(browser, ui, usual, slow)
    assert rows(browser, DIFFERENCES) == {"data.source": sources}
    seconds = {
        name: [float(value) for value in values]
        for name, values in rows(browser, RESULTS).items()
        if name.startswith("phase_s")
    }
    longer = {name: after - before for name, (before, after) in seconds.items()}
    assert max(longer, key=lambda name: longer[name]) == "phase_s.data"
    before, after = seconds["phase_s.data"]
    assert after > 3 * before
    picture(browser, "cause_data", 1100)
    seen(browser, f"a[href*='{slow}']").click()
    waits = "//figure[figcaption='Waiting for data']"
    WebDriverWait(browser, 20.0).until(lambda page: page.find_element(By.XPATH, waits))
    picture(browser, "cause_data_curves", 800, at="//figure[contains(., 'Samples per second')]")


def test_a_version_that_is_worse_is_traced_to_its_recipe(watched: dict[str, str], ui: str, browser: WebDriver) -> None:
    good = run_job(watched, "lifecycle", *DIGITS, "train.epochs=8")
    debugged = [*DIGITS, "train.epochs=8", "train.max_steps=12"]
    run_job(watched, "train", *debugged)
    run_job(watched, "compile", *debugged)
    beside = ["serve.version=1", "serve.shadow={percent: 100, version: 2}"]
    url = run_job(watched, "deploy", *DIGITS, *beside)["artifacts"]["http"]
    ask(url, seconds=40.0)
    browser.get(page_of(watched, "serving"))
    Select(browser.find_element(By.ID, "range")).select_by_visible_text("15 minutes")
    assert float(legend(browser, "Shadow agrees", "digits 2").removesuffix(" %")) < 90.0
    line = "//figure[figcaption='Shadow agrees']//*[name()='polyline']"
    WebDriverWait(browser, 60.0, 0.2, [Exception]).until(
        lambda page: str(page.find_element(By.XPATH, line).get_attribute("points")).count(" ") > 1
    )
    picture(browser, "cause_shadow", 560, at="//section[h2='Versions']")
    browser.get(f"{ui}/models")
    versions = rows(browser, ".table")
    column = [head.text for head in browser.find_elements(By.TAG_NAME, "th")].index("score") - 1
    first, second = (float(versions[name][column].removeprefix("accuracy ")) for name in ("digits/1", "digits/2"))
    assert first > 0.9 > second
    picture(browser, "cause_models", 420)
    trained = [link.text for link in browser.find_elements(By.CSS_SELECTOR, "a[href^='./runs/train']")]
    compare(browser, ui, *sorted(trained))
    assert rows(browser, DIFFERENCES)["train.max_steps"] == ["–", "12"]
    picture(browser, "cause_version", 1300)
    assert good["status"] == "succeeded"


def test_a_slow_rank_is_named_by_the_page_and_an_alert(
    watched: dict[str, str], browser: WebDriver, launch: Launch
) -> None:
    with endless_training(watched, launch):
        browser.get(page_of(watched, "training"))
        alert = WebDriverWait(browser, 240.0, 1.0, [Exception]).until(
            lambda page: seen(page, "#alerts", "Straggler").text
        )
        assert "rank 1 of run" in alert
        browser.find_element(By.ID, "only").send_keys("uneven", Keys.ENTER)
        Select(browser.find_element(By.ID, "range")).select_by_visible_text("15 minutes")
        quick, slow = (
            seconds_of(legend(browser, "Own work of each rank", f"rank {rank},", "uneven")) for rank in (0, 1)
        )
        assert slow > 0.4 > 4 * quick
        WebDriverWait(browser, 60.0).until(lambda page: "digits" not in page.find_element(By.ID, "panels").text)
        picture(browser, "cause_rank", 1350)
        photograph_ray(watched, browser)


@contextmanager
def endless_training(watched: dict[str, str], launch: Launch) -> Iterator[None]:
    """Train with a slow rank as a submitted job, and stop it at the end."""
    training = launch("rayloom", "submit", "train", *DIGITS, *ENDLESS, **watched)
    training.says("submitted")
    try:
        yield
    finally:
        (name,) = re.findall(r"Job '(train-\w+)'", training.output)
        run("ray", "job", "stop", name, environment=watched)
        training.ends(120.0)


def photograph_ray(watched: dict[str, str], browser: WebDriver) -> None:
    """Look at the pages of Ray's own dashboard that describe what runs here."""
    state = Cluster(watched).state
    token = Path(watched["RAY_AUTH_TOKEN_PATH"]).read_text(encoding="utf-8").strip()
    browser.get(state.dashboard)
    browser.add_cookie({"name": "ray-authentication-token", "value": token})
    pages = {"jobs": "uneven", "serve": "rayloom", "actors": "ModelServer"}
    for name, words in pages.items():
        browser.get("about:blank")
        browser.get(f"{state.dashboard}/#/{name}")
        seen(browser, "main, body", words)
        time.sleep(2.0)  # its tables fill one after another
        picture(browser, f"ray_{name}", 760)


def page_of(watched: dict[str, str], board: str) -> str:
    """Return the address of a dashboard on the monitoring page."""
    monitoring = Cluster(watched).state.monitoring
    assert monitoring
    return f"{monitoring.page}#{board}"


def seconds_of(value: str) -> float:
    """Return a duration as the page writes it, in seconds."""
    number, _, unit = value.partition(" ")
    return float(number) * {"s": 1.0, "ms": 1e-3}[unit]


def ask(url: str, seconds: float) -> None:
    """Send pictures to the endpoint for a while."""
    pixels = load_digits().images[:64].astype(np.float32) / 8 - 1
    tensor: dict[str, Any] = {"name": "pixel_values", "shape": [64, 1, 8, 8], "datatype": "FP32"}
    body = {"inputs": [{**tensor, "data": pixels.ravel().tolist()}]}
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        assert httpx.post(f"{url}/v2/models/digits/infer", json=body).status_code == 200
        time.sleep(0.05)
