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


def page_headers(page: str) -> dict[str, str]:
    """Return the headers of a page that has one style and one script. The browser runs nothing else.

    The script may ask only the server that the page came from.
    """
    policy = [
        "default-src 'none'",
        f"script-src {_source(page, 'script')}",
        f"style-src {_source(page, 'style')}",
        "connect-src 'self'",
        "img-src blob: data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "content-security-policy": "; ".join(policy),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def _source(page: str, tag: str) -> str:
    """Return what the page's one element of that kind contains, as a content security policy names it."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
