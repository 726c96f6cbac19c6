"""URIs in recipes and messages: which of them hold a secret, and how they are shown."""

import re
from urllib.parse import parse_qsl, urlsplit

_SECRET_NAME = re.compile(r"(?i)pass|pwd|secret|token|signature|^sig$|credential|auth|(^|[_-])key|[a-z]key$|keyid$")
"""Names of parameters that hold secrets: passwords, tokens, keys and the signatures of signed addresses."""

_PATHS = ("sslkey", "sslcert", "sslrootcert")
"""Parameters of databases that name a file with a key."""


def holds_secret(text: str) -> bool:
    """Return whether a URI has a password, a token or a signature. So has one whose parts cannot be told apart."""
    if "://" not in text:
        return False
    scheme, _, rest = text.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    login = authority.rpartition("@")[0]
    # A web server takes a token in place of the user.
    if ":" in login or (login and scheme.lower() in ("http", "https")):
        return True
    try:
        parts = urlsplit(text)
    except ValueError:  # such as an unclosed bracket
        return "@" in text
    names = [name for part in (parts.query, parts.fragment) for name, _ in parse_qsl(part, keep_blank_values=True)]
    return any(_SECRET_NAME.search(name) and name.lower() not in _PATHS for name in names)


def hide_secrets(text: str) -> str:
    """Return the text with each URI in it that holds a secret cut to scheme, host and path."""
    return re.sub(r"[\w+.-]+://\S+", lambda uri: without_secrets(uri[0]) if holds_secret(uri[0]) else uri[0], text)


def without_secrets(text: str) -> str:
    """Return the text with each URI in it cut to scheme, host and path."""
    return re.sub(r"(://[^?#\s]*)[?#]\S*", r"\1", re.sub(r"://[^/?#\s]*@", "://", text))
