"""URIs in recipes and messages: finding and hiding the secrets in them."""

import re
from urllib.parse import parse_qsl, urlsplit

_SECRET_NAME = re.compile(
    r"(?i)(^|[_-])(pass|auth|token)s?($|[_-])|passw|pass(phrase|code)?$|jwt$|pwd|secret|signature|^sig$|credential|authorization"
    r"|[a-z]token$|(^|[_-])key|[a-z]key$|keyid$"
)
"""Names of parameters that hold secrets: passwords, tokens, keys and the signatures of signed addresses."""

_OTHER_NAMES = ("sslkey", "sslcert", "sslrootcert", "ssl_key", "ssl_cert", "ssl_ca", "partition_key", "sort_key")
"""Names that only look like secrets: key files, and columns."""

_CHAIN = re.compile(r"::(?=[A-Za-z][\w+.-]*://)")
"""The separator of links in fsspec's chains. IPv6 addresses have colons, too."""

_LOGIN = re.compile(r"://(?:[^/?#\s@:]*:(?!\d+[/?#]|:)\S*|[^/?#\s]*)@")
"""The part before the host. A password may contain slashes, unless it begins like a port."""


def holds_secret(text: str) -> bool:
    """Return whether a URI has a password, a token or a signature, or has an ``@`` and cannot be parsed.

    In an fsspec chain, such as ``zip://rows.csv::s3://…``, every link is checked.
    """
    return any(_link_holds_secret(link) for link in _CHAIN.split(text))


def _link_holds_secret(text: str) -> bool:
    if "://" not in text:
        return False
    scheme = text.partition("://")[0].lower()
    login = _LOGIN.search(text)
    # A web server accepts a token in place of the user. In fsspec's github:// this is the owner and the repository.
    if login and scheme != "github" and (":" in login[0][3:] or scheme in ("http", "https")):
        return True
    try:
        parts = urlsplit(text)
    except ValueError:  # such as an unclosed bracket
        return "@" in text
    names = [name for part in (parts.query, parts.fragment) for name, _ in parse_qsl(part, keep_blank_values=True)]
    return any(_SECRET_NAME.search(name) and name.lower() not in _OTHER_NAMES for name in names)


def hide_secrets(text: str) -> str:
    """Return the text with every URI that holds a secret reduced to scheme, host and path."""
    return re.sub(r"[\w+.-]+://\S+", lambda uri: without_secrets(uri[0]) if holds_secret(uri[0]) else uri[0], text)


def without_secrets(text: str) -> str:
    """Return the text with every URI reduced to scheme, host and path."""
    return re.sub(r"(://[^?#\s]*)[?#]\S*", r"\1", _LOGIN.sub("://", text))
