"""The page at ``/``: one file, and nothing but its own script runs in it."""

import re

import httpx

from app.serving.page import PAGE
from tests.serving import serving


def test_the_page_is_one_file_with_a_strict_policy() -> None:
    with serving() as server:
        answer = httpx.get(f"http://{server.http}/")
    assert answer.text == PAGE
    policy = dict(each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert all(re.fullmatch(r"'sha256-.{44}'", policy[kind]) for kind in ("script-src", "style-src"))
    assert not re.search(r"https?://|\son\w+=|\sstyle=|innerHTML", PAGE)
