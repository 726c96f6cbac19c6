"""The page at ``/``: the models and how they fare, and one to try with a text or an image."""

import base64
import hashlib
import re
from importlib.resources import files

PAGE = files("app.serving.transport").joinpath("page.html").read_text(encoding="utf-8")
"""All of it, style and script included; it asks the endpoint's own routes."""


def _source(tag: str) -> str:
    """What the page's one element of that kind contains, as a content security policy names it."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


PAGE_HEADERS = {
    "content-security-policy": "; ".join(
        [
            "default-src 'none'",
            f"script-src {_source('script')}",
            f"style-src {_source('style')}",
            "connect-src 'self'",
            "img-src blob: data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Nothing but this script runs, and it asks nobody else: a label or a model's name can bring no script of its own."""
