"""Pages of runs: what stands in them is text, charts keep their outline, and they fit every screen, light and dark."""

import math
import re
from pathlib import Path

import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from upath import UPath

from app.pages.content import Chart, Link, Series, State, thin
from app.pages.page import Page
from tests.browser import dark, phone, seen

HOSTILE = "</script><img src=x onerror=document.body.remove()>"
SPIKE = 4321
LOSSES = [math.exp(-step / 1000) for step in range(10_000)]
LOSSES[SPIKE] = 50.0


def page() -> Page:
    """A page with one of everything, wider than a phone."""
    made = Page(HOSTILE, State(HOSTILE, "good"), [Link(HOSTILE, '"><script>')])
    made.add_verdict(HOSTILE, "bad", HOSTILE)
    made.add_error(HOSTILE)
    made.add_figures({"loss": HOSTILE})
    made.add_facts({"name": HOSTILE})
    made.add_trail({"data": HOSTILE, "version": Link(HOSTILE, "../x.html")})
    made.add_heading(HOSTILE)
    curve = Series(HOSTILE, range(10_000), LOSSES)
    choices = Series("choices", [0, 1, 1], [0.5, 0.7, 0.8], "points", labels=["trial 0", "trial 1", "trial 2"])
    points = Series("settings", [1.0, 100.0], [2.0, math.nan], "points", labels=[HOSTILE, "b"])
    made.add_charts(Chart("Loss", "step", "loss", [curve, Series("validation", [0, 9999], [1.0, 0.1], "both")]))
    made.add_charts(Chart("Settings", "ms", "rows/s", [points], log_x=True, log_y=True))
    made.add_charts(Chart("Choices", "name", "accuracy", [choices], x_names=["adamw", HOSTILE]))
    made.add_table([HOSTILE, *map(str, range(30))], [[HOSTILE, *range(1000, 1030)]])
    made.add_matrix(["a", HOSTILE], [[3, 1], [0, 0]])
    made.add_bars({HOSTILE: 1.0, "most": 3.0}, lambda amount: f"{amount:g} {HOSTILE}")
    made.add_code(HOSTILE, summary=HOSTILE)
    return made


@pytest.fixture
def opened(browser: WebDriver, tmp_path: Path) -> WebDriver:
    page().write(UPath(tmp_path / "report.html"))
    browser.get_log("browser")  # tests before this one leave their errors in it
    browser.get((tmp_path / "report.html").as_uri())
    return browser


def test_what_is_given_is_shown_as_text(opened: WebDriver) -> None:
    assert not opened.find_elements(By.CSS_SELECTOR, "img")
    assert seen(opened, "h1").text == HOSTILE
    assert seen(opened, "section h2").text == HOSTILE
    assert seen(opened, ".trail a").text == HOSTILE
    assert HOSTILE in seen(opened, ".table tbody td").text
    assert seen(opened, "section .verdict.bad").text == f"{HOSTILE}."


def test_a_bar_fills_its_share_of_the_track(opened: WebDriver) -> None:
    tracks = opened.find_elements(By.CSS_SELECTOR, ".bars .track")
    bars = [track.find_element(By.CSS_SELECTOR, "span") for track in tracks]
    shares = [bar.size["width"] / track.size["width"] for bar, track in zip(bars, tracks, strict=True)]
    assert shares == pytest.approx([0.25, 0.75], abs=0.01)
    assert [words.text for words in opened.find_elements(By.CSS_SELECTOR, ".bars .amount")] == [
        f"1 {HOSTILE}, 25.0 %",
        f"3 {HOSTILE}, 75.0 %",
    ]


def test_a_chart_shows_its_curves_hides_them_and_names_values_under_the_pointer(opened: WebDriver) -> None:
    chart = seen(opened, ".chart")
    assert len(chart.find_elements(By.CSS_SELECTOR, "svg[role=img] .curve")) == 2
    labels = [text.text for text in chart.find_elements(By.CSS_SELECTOR, "svg[role=img] text")]
    assert {"0", "40", "10,000", "step", "loss"} <= set(labels)
    entry = chart.find_element(By.CSS_SELECTOR, ".legend button")
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    assert len(chart.find_elements(By.CSS_SELECTOR, "svg[role=img] .curve")) == 1
    opened.execute_script(
        "const box = arguments[0].getBoundingClientRect(); arguments[0].dispatchEvent(new PointerEvent('pointermove',"
        "{clientX: box.right - 20, clientY: box.top + 90, bubbles: true}))",
        chart.find_element(By.CSS_SELECTOR, "svg[role=img]"),
    )
    assert seen(opened, ".chart .tip").text == "step 9,999\nvalidation  0.1"


def test_values_without_an_order_stand_side_by_side_under_their_names(opened: WebDriver) -> None:
    chart = opened.find_elements(By.CSS_SELECTOR, ".chart")[-1]
    labels = [text.text for text in chart.find_elements(By.CSS_SELECTOR, "svg[role=img] text")]
    assert {"adamw", HOSTILE, "name", "accuracy"} <= set(labels)
    drawn = [path.location["x"] for path in chart.find_elements(By.CSS_SELECTOR, "svg[role=img] g path")]
    assert drawn[0] < drawn[1] == drawn[2]


def test_pages_fit_a_phone_and_only_tables_scroll(opened: WebDriver) -> None:
    with phone(opened):
        opened.refresh()
        seen(opened, ".chart svg")
        assert opened.execute_script("return document.documentElement.scrollWidth") == 390
        table = seen(opened, ".table[role=region]")
        assert opened.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", table)
        assert table.get_attribute("tabindex") == "0"


@pytest.mark.parametrize("is_dark", [False, True])
def test_text_and_curves_stand_out_in_light_and_dark(opened: WebDriver, is_dark: bool) -> None:
    names = ("text", "quiet", "accent", "good", "bad", "warm", *(f"series-{index}" for index in range(8)))

    def colors() -> dict[str, str]:
        script = "const s = getComputedStyle(document.body); return arguments[0].map(n => s.getPropertyValue('--' + n))"
        found: list[str] = opened.execute_script(script, [*names, "surface", "ground"])
        return dict(zip([*names, "surface", "ground"], found, strict=True))

    if is_dark:
        with dark(opened):
            opened.refresh()
            found = colors()
            assert seen(opened, ".chart svg text").value_of_css_property("fill") == "rgb(160, 169, 177)"
    else:
        found = colors()
    for name in names:
        for behind in ("surface", "ground"):
            enough = 3.0 if name.startswith("series") else 4.5  # WCAG 2.2: of graphics, and of text
            assert contrast(found[name], found[behind]) >= enough, (name, behind)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colors, by WCAG 2.2."""
    lighter, darker = sorted(map(luminance, (one, other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(color: str) -> float:
    """The relative luminance of ``#rrggbb``, by WCAG 2.2."""
    channels = [int(part, 16) / 255 for part in re.findall("..", color.strip().removeprefix("#"))]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_pages_need_no_network(opened: WebDriver) -> None:
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert not [entry for entry in opened.get_log("browser") if entry["level"] == "SEVERE"]
    assert len(page().to_html()) < 120_000


def test_a_long_curve_is_thinned_and_keeps_its_spikes_and_gaps() -> None:
    kept = thin(LOSSES, 1000)
    assert len(kept) <= 1000
    assert SPIKE in kept
    assert list(kept) == sorted(kept)
    assert thin(LOSSES, 10_000) == range(10_000)
    assert len(thin([math.nan] * 5000, 100)) <= 100
