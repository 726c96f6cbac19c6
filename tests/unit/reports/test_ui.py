"""The pages of all runs and models, in a browser: they compare runs, and show what is given as text."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path

import httpx
import pytest
import uvicorn
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
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
    browser.get(f"{url}/")
    return browser


def cells(page: WebDriver, heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading, by rows."""
    rows = seen(page, f"[aria-label='{heading}'] tbody").find_elements(By.TAG_NAME, "tr")
    return [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in rows]


def test_runs_are_listed_and_compared(page: WebDriver) -> None:
    rows = cells(page, "Runs")
    assert [row[2:4] for row in rows] == [[LIVE, "running"], [FAILED, "failed"], [GOOD, "succeeded"]]
    assert rows[1][-1] == HOSTILE
    for name in (GOOD, FAILED):
        seen(page, f"[aria-label='Compare train/{name}']").click()
    seen(page, "button", "Compare").click()
    assert cells(page, "Differences of the recipes") == [["train.optimizer.lr", "0.003", "0.5"]]
    results = {name: values for name, *values in cells(page, "Results")}
    assert (results["status"], results["val_loss"]) == (["succeeded", "failed"], ["0.25", "–"])
    assert results["phase_s.backward"] == ["4", "4"]
    seen(page, f"a[href$='train/{GOOD}/report.html']").click()
    seen(page, "h1", "digits, trained")


def test_the_list_is_limited_to_a_job_and_a_recipe(page: WebDriver) -> None:
    seen(page, "[name=recipe]").send_keys("faces", Keys.ENTER)
    seen(page, "p", "No runs")
    assert seen(page, "[name=recipe]").get_attribute("value") == "faces"
    Select(seen(page, "[name=job]")).select_by_value("train")
    seen(page, "[name=recipe]").clear()
    seen(page, "button", "Show").click()
    assert len(cells(page, "Runs")) == 3


def test_the_report_of_a_run_that_goes_on_has_its_steps_so_far(page: WebDriver, storage: UPath) -> None:
    seen(page, f"a[href$='{LIVE}/report.html']").click()
    assert "running" in seen(page, "header .state").text
    before = seen(page, ".chart svg[role=img] path").get_attribute("d")
    add_steps(storage / "runs/train" / LIVE, [0.75, 0.5], first=2, val_entity_f1=0.75)
    page.refresh()
    seen(page, ".chart figcaption", "Entity f1")
    assert seen(page, ".chart svg[role=img] path").get_attribute("d") != before


def test_a_run_of_a_job_without_a_report_has_a_page(tmp_path: Path) -> None:
    write_run(UPath(tmp_path), GOOD, job="prepare", metrics={"rows": 1700})
    with served(UPath(tmp_path)) as url:
        shown = httpx.get(f"{url}/runs/prepare/{GOOD}/report.html").text
    assert all(words in shown for words in ("rows", "1,700", "succeeded", "validation_fraction"))


def test_models_are_listed_with_the_runs_that_made_them(page: WebDriver) -> None:
    seen(page, "nav a", "Models").click()
    scores = {name: score for name, _, _, _, score, *_ in cells(page, "Models")}
    assert scores == {"digits/1": "accuracy 0.9000", "names/1": "entity f1 0.7500"}


def test_only_tables_scroll_on_a_phone(page: WebDriver) -> None:
    with phone(page):
        page.refresh()
        seen(page, ".table tbody")
        assert page.execute_script("return document.documentElement.scrollWidth") == 390


def test_no_script_runs_and_no_other_server_is_asked(page: WebDriver, url: str) -> None:
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    page.execute_script("document.body.append(Object.assign(document.createElement('script'), {text: 'ran = 1'}))")
    assert page.execute_script("return self.ran") is None
    assert "script-src 'none'" in httpx.get(url).headers["content-security-policy"]
    report = httpx.get(f"{url}/runs/train/{GOOD}/report.html")
    assert report.headers["content-security-policy"].startswith("sandbox allow-scripts; default-src 'none'")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_token_is_asked_for_and_kept_where_no_script_can_read_it(
    storage: UPath, browser: WebDriver, host: str
) -> None:
    with served(storage, Access.by_token(TOKEN), host) as url:
        for path in ("", "models", f"compare?run={GOOD}&run={FAILED}", f"runs/train/{GOOD}/report.html"):
            refused = httpx.get(f"{url}/{path}")
            assert refused.status_code == 401
            assert "digits" not in refused.text
        assert httpx.get(url, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert httpx.post(f"{url}/login", content=b"token=" + b"t" * 5000).status_code == 401
        browser.get(f"{url}/runs/train/{GOOD}/report.html")
        seen(browser, "[name=token]").send_keys("wrong", Keys.ENTER)
        seen(browser, ".error", "not this endpoint's token")
        seen(browser, "[name=token]").send_keys(TOKEN, Keys.ENTER)
        seen(browser, ".table tbody", GOOD)
        assert browser.execute_script("return document.cookie + localStorage.length") == "0"
        browser.get(f"{url}/runs/train/{GOOD}/report.html")
        seen(browser, "h1", "digits, trained")
        browser.get(url)
        seen(browser, "button", "Forget the token").click()
        seen(browser, "[name=token]")


def test_what_is_not_there_is_404_and_another_name_for_this_machine_is_refused(url: str) -> None:
    assert httpx.get(f"{url}/runs/train/nothing/report.html").status_code == 404
    assert httpx.get(f"{url}/runs/train/..%2F..%2Fx/report.html").status_code == 404
    for header, value in (("Host", "evil.example"), ("Host", "[::"), ("Origin", "http://evil.example")):
        refused = httpx.get(url, headers={header: value})
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
        ("compare", {"run": [f"{job}/run", f"train/{GOOD}"]}),
        ("", {"job": job}),
    ):
        answer = httpx.get(f"{url}/{path}", params=query)
        assert answer.status_code == 404, answer.text
        assert "expected one of lifecycle, prepare, train" in answer.text
        assert "hunter2" not in answer.text


def test_a_damaged_recipe_is_named(tmp_path: Path) -> None:
    storage = UPath(tmp_path)
    with served(storage) as url:
        for content, run in ((b"a: [\n", GOOD), (b"\xff\x00", FAILED), (b"[" * 1000, LIVE)):
            (write_run(storage, run) / CONFIG_FILE).write_bytes(content)
            for path in (f"compare?run={run}&run={run}", f"runs/train/{run}/report.html"):
                refused = httpx.get(f"{url}/{path}")
                assert refused.status_code == 404
                assert f"{run}/config.yaml' is not YAML any more" in unescape(refused.text)
            assert httpx.get(url).status_code == 200


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (config := write_run(UPath(tmp_path), GOOD) / CONFIG_FILE).unlink()
    config.mkdir()  # unlike missing rights, this also stops root
    with served(UPath(tmp_path)) as url:
        refused = httpx.get(f"{url}/compare?run={GOOD}&run={GOOD}")
        assert refused.status_code == 503
        assert "config.yaml" in refused.text


def test_one_run_is_not_compared(url: str) -> None:
    refused = httpx.get(f"{url}/compare?run={GOOD}")
    assert (refused.status_code, "give two or more" in refused.text) == (400, True)


def test_the_command_names_its_address(storage: UPath) -> None:
    code = "from app.cli.main import main; main()"
    command = [sys.executable, "-c", code, "ui", "--port", "0", "--storage", str(storage)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            address = line.rsplit(" ", 1)[1].strip()
            assert str(storage) in httpx.get(address).text
        finally:
            process.terminate()
