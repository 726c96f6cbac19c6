"""Pages in Debian's Chromium."""

import base64
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

SCREENSHOTS = "RAYLOOM_SCREENSHOTS"
"""The environment variable with the folder for pictures of pages, such as ``docs/images``."""


@contextmanager
def started_browser() -> Iterator[WebDriver]:
    """Start a browser without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1280,1000",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield browser
    browser.quit()


@contextmanager
def screen(browser: WebDriver, width: int, height: int = 844) -> Iterator[None]:
    """Give the browser a screen of this size. A narrow one is a phone's."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def phone(browser: WebDriver) -> AbstractContextManager[None]:
    """Give the browser the screen of a phone."""
    return screen(browser, 390)


@contextmanager
def dark(browser: WebDriver) -> Iterator[None]:
    """Ask pages for their dark colors. An open page has changed them in the block."""
    scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    # The page's listeners run just before the next frame.
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def seen(page: WebDriver, css: str, words: str = "") -> WebElement:
    """The element, once it is visible and says the words."""

    def look(_: WebDriver) -> WebElement | None:
        found = page.find_elements(By.CSS_SELECTOR, css)
        return next((item for item in found if item.is_displayed() and words in item.text), None)

    return WebDriverWait(page, 60, 0.05, [Exception]).until(look, f"{css!r} never said {words!r}")


def picture(page: WebDriver, name: str, height: int = 1000, at: str = "") -> None:
    """Write what the browser shows to ``NAME.png``, if pictures are wanted. ``at`` is the XPath of what is on top."""
    if folder := os.environ.get(SCREENSHOTS):
        page.set_window_size(1280, height)
        if at:
            page.execute_script("arguments[0].scrollIntoView()", page.find_element(By.XPATH, at))
        page.save_screenshot(str(Path(folder) / f"{name}.png"))


def whole_picture(page: WebDriver, name: str) -> None:
    """Write the whole page to ``NAME.png``, if pictures are wanted."""
    if folder := os.environ.get(SCREENSHOTS):
        taken = page.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        (Path(folder) / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))
