"""URIs in recipes and messages: finding and hiding the secrets in them."""

import re
from urllib.parse import parse_qsl, urlsplit

_SECRET_NAME = re.compile(
    r"(?i)(^|[_-])(pass|auth|token)s?($|[_-])|passw|pass(phrase|code)?$|jwt$|pwd|secret|signature|^sig$|credential"
    r"|authorization|[a-z]token$|(^|[_-])key|[a-z]key$|keyid$"
)
"""Names of parameters that hold secrets: passwords, tokens, keys and the signatures of signed addresses."""

_OTHER_NAMES = ("sslkey", "sslcert", "sslrootcert", "ssl_key", "ssl_cert", "ssl_ca", "partition_key", "sort_key")
"""Names that only look like secrets: key files, and columns."""

_CHAIN = re.compile(r"::(?=[A-Za-z][\w+.-]*://)")
"""The separator of links in fsspec's chains. IPv6 addresses have colons, too."""


def holds_secret(text: str) -> bool:
    """Return whether a URI has a password, a token or a signature, or has an ``@`` and cannot be parsed.

    In an fsspec chain, such as ``zip://rows.csv::s3://…``, every link is checked.
    """
    return any(_link_holds_secret(link) for link in _CHAIN.split(text))


def _link_holds_secret(link: str) -> bool:
    scheme, is_uri, rest = link.partition("://")
    if not is_uri:
        return False
    login, protocol = _login_of(rest), re.split(r"[+.-]", scheme.lower())[-1]
    # A web server accepts a token in place of the user. In fsspec's github:// this is the owner and the repository.
    if login and protocol != "github" and (":" in login or protocol in ("http", "https")):
        return True
    try:
        parts = urlsplit(link)
    except ValueError:  # such as an unclosed bracket
        return "@" in link
    names = [name for part in (parts.query, parts.fragment) for name, _ in parse_qsl(part, keep_blank_values=True)]
    return any(_SECRET_NAME.search(name) and name.lower() not in _OTHER_NAMES for name in names)


def _login_of(rest: str) -> str:
    """Return the user and the password at the start of a URI without its scheme; an empty string if there are none.

    A password may contain slashes, unless it begins like a port.
    """
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        return authority.rpartition("@")[0]
    _, colon, password = authority.partition(":")
    has_password = colon and not password.isdigit() and not authority.startswith("[")
    return rest.rpartition("@")[0] if has_password else ""


def hide_secrets(text: str) -> str:
    """Return the text with every URI that holds a secret reduced to scheme, host and path."""
    return re.sub(r"[\w+.-]+://\S+", lambda uri: without_secrets(uri[0]) if holds_secret(uri[0]) else uri[0], text)


def without_secrets(location: str) -> str:
    """Return a location, which may contain spaces, reduced to scheme, host and path. A path stays as it is."""
    return "::".join(map(_link_without_secrets, _CHAIN.split(location)))


def _link_without_secrets(link: str) -> str:
    scheme, is_uri, rest = link.partition("://")
    if not is_uri:
        return link
    login = _login_of(rest)
    shown = rest[len(login) :].removeprefix("@") if login else rest
    return scheme + is_uri + re.split(r"[?#]", shown, maxsplit=1)[0]
