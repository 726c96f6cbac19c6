"""The page of all runs and models, in a browser: it is live, compares runs, and shows what is given as text."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from upath import UPath

from app.repository.score import Score
from app.runs import CONFIG_FILE
from app.serving.access import Access
from app.ui.server import create_app
from tests.browser import phone, seen
from tests.engine_contract import PROCESSOR, SIGNATURE
from tests.stored_runs import add_steps, write_run
from tests.toy import publish_version

TOKEN = "t" * 32
HOSTILE = "<img src=x onerror=document.body.remove()>"
GOOD, FAILED, LIVE = "20260101-000000-digits-aaaa", "20260102-000000-digits-bbbb", "20260103-000000-digits-cccc"


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    storage = UPath(tmp_path_factory.mktemp("storage"))
    publish_version(storage, "digits", b"a model", SIGNATURE, PROCESSOR, ["a", "b", "c"])
    publish_version(storage, "names", b"a model", SIGNATURE, PROCESSOR, [], score=Score(metric="entity_f1", value=0.75))
    losses = [2.0, float("nan"), 1.0]
    write_run(storage, GOOD, metrics={"val_loss": 0.25, "val_accuracy": float("nan")}, losses=losses)
    write_run(storage, FAILED, "train.optimizer.lr=0.5", status="failed", error=HOSTILE, losses=[3.0, 2.5, 2.25])
    write_run(storage, LIVE, status=None, losses=[1.0])
    return storage


@contextmanager
def served(storage: UPath, access: Access = Access(), host: str = "127.0.0.1") -> Iterator[str]:  # noqa: B008
    """Serve the page, and yield its address."""
    server = uvicorn.Server(uvicorn.Config(create_app(storage, access, host), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def url(storage: UPath) -> Iterator[str]:
    with served(storage) as url:
        yield url


@pytest.fixture
def page(url: str, browser: WebDriver) -> WebDriver:
    browser.get("about:blank")
    browser.get(f"{url}/#/runs")
    return browser


def test_runs_are_listed_and_compared(page: WebDriver) -> None:
    rows = seen(page, "#runs tbody").find_elements(By.TAG_NAME, "tr")
    assert [row.find_element(By.TAG_NAME, "a").text for row in rows] == [LIVE, FAILED, GOOD]
    assert [row.find_element(By.CSS_SELECTOR, ".state").text for row in rows] == ["running", "failed", "succeeded"]
    assert HOSTILE in rows[1].text
    for name in (GOOD, FAILED):
        seen(page, f"[aria-label='Compare train/{name}']").click()
    seen(page, "#compare", "Compare 2").click()
    differing = seen(page, "#differences", "train.optimizer.lr").find_elements(By.CSS_SELECTOR, "tbody tr")
    assert [cell.text for row in differing for cell in row.find_elements(By.TAG_NAME, "td")] == [
        "train.optimizer.lr", "0.003", "0.5",
    ]  # fmt: skip
    charts = page.find_elements(By.CSS_SELECTOR, ".chart")
    assert [chart.find_element(By.TAG_NAME, "figcaption").text for chart in charts][:2] == [
        "Training loss", "Validation loss",
    ]  # fmt: skip
    assert len(charts[0].find_elements(By.CSS_SELECTOR, "svg[role=img] .curve")) == 2
    assert "val_loss" in seen(page, "#metrics").text
    assert "phase_s.backward 4 4" in seen(page, "#metrics").text


def test_a_run_that_goes_on_is_drawn_live(page: WebDriver, storage: UPath) -> None:
    seen(page, f"a[href='#/run/train/{LIVE}']").click()
    seen(page, "#summary", "running")
    before = seen(page, ".chart svg[role=img] path").get_attribute("d")
    folder = storage / "runs/train" / LIVE
    add_steps(folder, [0.75, 0.5], first=2, val_entity_f1=0.75)
    deadline = time.monotonic() + 20
    while seen(page, ".chart svg[role=img] path").get_attribute("d") == before:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    seen(page, ".chart figcaption", "Validation entity f1")
    seen(page, "a", "Open the report").click()
    assert "running" in seen(page, "header .state").text
    assert seen(page, ".chart svg[role=img] .curve")


def test_models_are_listed_with_the_runs_that_made_them(page: WebDriver) -> None:
    seen(page, "nav a[href='#/models']").click()
    assert "digits/1" in seen(page, "#view tbody").text
    assert "accuracy 0.9000" in seen(page, "#view tbody").text
    assert "entity f1 0.7500" in seen(page, "#view tbody").text


def test_only_tables_scroll_on_a_phone(page: WebDriver) -> None:
    with phone(page):
        page.refresh()
        seen(page, "#runs tbody")
        assert page.execute_script("return document.documentElement.scrollWidth") == 390


def test_no_script_but_its_own_runs_and_no_other_server_is_asked(page: WebDriver, url: str) -> None:
    seen(page, "#runs tbody", HOSTILE)
    fetched = page.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert fetched
    assert all(item.startswith(url) for item in fetched)
    page.execute_script("document.body.append(Object.assign(document.createElement('script'), {text: 'ran = 1'}))")
    assert page.execute_script("return self.ran") is None
    report = httpx.get(f"{url}/runs/train/{GOOD}/report.html")
    assert report.headers["content-security-policy"].startswith("sandbox allow-scripts; default-src 'none'")


def test_a_token_is_asked_for_and_kept_where_no_script_can_read_it(storage: UPath, browser: WebDriver) -> None:
    with served(storage, Access.by_token(TOKEN), host="0.0.0.0") as url:
        for path in ("api/runs", f"runs/train/{GOOD}/report.html"):
            assert httpx.get(f"{url}/{path}").status_code == 401
        assert httpx.get(f"{url}/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        browser.get(url)
        seen(browser, "#token").send_keys("wrong", Keys.ENTER)
        seen(browser, "#refusal", "not this endpoint's token")
        seen(browser, "#token").send_keys(TOKEN, Keys.ENTER)
        seen(browser, "#runs tbody", GOOD)
        assert browser.execute_script("return document.cookie + localStorage.length") == "0"
        browser.get(f"{url}/runs/train/{GOOD}/report.html")
        seen(browser, "h1", "digits, trained")
        browser.get(url)
        seen(browser, "#forget").click()
        seen(browser, "#token")
        browser.delete_all_cookies()


def test_what_is_not_there_is_404_and_another_name_for_this_machine_is_refused(url: str) -> None:
    assert httpx.get(f"{url}/api/runs/train/nothing").status_code == 404
    assert httpx.get(f"{url}/runs/train/..%2F..%2Fx/report.html").status_code == 404
    for header, value in (("Host", "evil.example"), ("Host", "[::"), ("Origin", "http://evil.example")):
        refused = httpx.get(f"{url}/api/runs", headers={header: value})
        assert refused.status_code == 401
        assert f"{header} is {value!r}" in refused.json()["error"]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """The path of a folder outside storage that looks like a job's runs: ``SECRET/job/run/config.yaml``."""
    (folder := tmp_path / "job" / "run").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: digits\npassword: hunter2\n", encoding="utf-8")
    return str(tmp_path)


@pytest.mark.parametrize("form", ["absolute", "relative", "uri", "foreign uri", "hidden"])
def test_only_runs_in_storage_are_read(url: str, storage: UPath, secret: str, form: str) -> None:
    job = {
        "absolute": f"{secret}/job",
        "relative": f"{os.path.relpath(secret, str(storage / 'runs'))}/job",
        "uri": f"file://{secret}/job",
        "foreign uri": "s3://bucket/runs/train",
        "hidden": "train/../../models",
    }[form]
    for path, query in (
        ("api/compare", {"run": [f"{job}/run", f"train/{GOOD}"]}),
        ("api/runs", {"job": job}),
    ):
        answer = httpx.get(f"{url}/{path}", params=query)
        assert answer.status_code == 404, answer.text
        assert "expected one of lifecycle, prepare, train" in answer.json()["error"]
        assert "hunter2" not in answer.text


def test_a_damaged_recipe_is_named(tmp_path: Path) -> None:
    storage = UPath(tmp_path)
    for content, run in ((b"a: [\n", GOOD), (b"\xff\x00", FAILED), (b"[" * 5000, LIVE)):
        (write_run(storage, run) / CONFIG_FILE).write_bytes(content)
        with served(storage) as url:
            refused = httpx.get(f"{url}/api/compare", params={"run": run})
            assert refused.status_code == 404
            assert f"{run}/config.yaml' is not YAML any more" in refused.json()["error"]
            assert httpx.get(f"{url}/api/runs").status_code == 200
            assert httpx.get(f"{url}/api/runs/train/{run}").status_code == 200


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (config := write_run(UPath(tmp_path), GOOD) / CONFIG_FILE).unlink()
    config.mkdir()  # unlike missing rights, this also stops root
    with served(UPath(tmp_path)) as url:
        refused = httpx.get(f"{url}/api/compare", params={"run": GOOD})
        assert refused.status_code == 503
        assert "config.yaml" in refused.json()["error"]


def test_answers_are_json_also_where_figures_are_no_numbers(url: str) -> None:
    curves = json.loads(httpx.get(f"{url}/api/runs/train/{GOOD}/curves").content)
    assert curves["of_steps"]["loss"] == {"steps": [1, 2, 3], "values": [2.0, None, 1.0]}
    assert httpx.get(f"{url}/api/runs/train/{GOOD}").json()["metrics"]["val_loss"] == 0.25


def test_the_command_names_its_address(storage: UPath) -> None:
    code = "from app.cli.main import main; main()"
    command = [sys.executable, "-c", code, "ui", "--port", "0", "--storage", str(storage)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            address = line.rsplit(" ", 1)[1].strip()
            assert httpx.get(f"{address}api").json()["storage"] == str(storage)
        finally:
            process.terminate()
