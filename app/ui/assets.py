"""The page of ``rayloom ui``: one file with its style and script."""

from importlib.resources import files

from app.pages.assets import STYLE, read_asset

_OWN = files(__package__)

PAGE = (
    (_OWN / "page.html")
    .read_text(encoding="utf-8")
    .replace("/* style */", STYLE + read_asset("report.css") + (_OWN / "ui.css").read_text(encoding="utf-8"))
    .replace("/* script */", read_asset("charts.js") + (_OWN / "ui.js").read_text(encoding="utf-8"))
)
