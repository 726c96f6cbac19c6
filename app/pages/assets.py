"""The style and the scripts that pages share."""

import base64
import hashlib
import re
from importlib.resources import files


def read_asset(name: str) -> str:
    """Return the text of a file of this package."""
    return (files(__package__) / name).read_text(encoding="utf-8")


STYLE = read_asset("style.css")
"""Colors, type and controls of every page, light and dark."""


def page_headers(page: str, has_forms: bool = False) -> dict[str, str]:
    """Return the headers of a page. The browser runs nothing but the scripts and styles that it contains or links to.

    Its scripts and its forms may ask only the server that the page came from.
    """
    policy = [
        "default-src 'none'",
        f"script-src {_source(page, 'script', '<script src=')}",
        f"style-src {_source(page, 'style', '<link rel=stylesheet ')}",
        "connect-src 'self'",
        "img-src blob: data:",
        "base-uri 'none'",
        "form-action 'self'" if has_forms else "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "content-security-policy": "; ".join(policy),
        "cache-control": "no-cache",
        # Without a referrer, a browser sends a form with 'Origin: null'.
        "referrer-policy": "same-origin" if has_forms else "no-referrer",
        "x-content-type-options": "nosniff",
    }


def _source(page: str, tag: str, link: str) -> str:
    """Return what the page's elements of that kind contain and link to, as a content security policy names it."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
    sources = [f"'sha256-{digest}'" for digest in digests]
    return " ".join(["'self'", *sources] if link in page else sources) or "'none'"
