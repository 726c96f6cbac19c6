"""URIs in recipes and messages: finding and hiding the secrets in them."""

import re
from urllib.parse import unquote_plus

from fsspec import available_protocols

_SECRET_NAME = re.compile(
    r"(?i)(^|[_-])(pass|auth|token)s?($|[_-])|passw|pass(phrase|code)?$|jwt$|pwd|secret|signature|^sig$|credential"
    r"|authorization|[a-z]token$|(^|[_-])key|[a-z]key$|keyid$"
)
"""Names of parameters that hold secrets: passwords, tokens, keys and the signatures of signed addresses."""

_OTHER_NAMES = ("sslkey", "sslcert", "sslrootcert", "ssl_key", "ssl_cert", "ssl_ca", "partition_key", "sort_key")
"""Names that only look like secrets: key files, and columns."""

_CHAIN = re.compile(r"(::|[,\s]+)(?=[A-Za-z][\w+.-]*://)")
"""The separator of links in fsspec's chains, or of several URIs. IPv6 addresses have colons, too."""


_PATHS = frozenset(available_protocols()) - {"http", "https"}
"""The protocols of file systems, whose paths may contain ``@``. The paths of other URIs are percent-encoded."""

PERCENT_ENCODE = "If an @ behind the host ends no password, percent-encode it as %40"


def holds_secret(text: str) -> bool:
    """Return whether a URI has a password, a token or a signature, or has an ``@`` that may end a password.

    In an fsspec chain, such as ``zip://rows.csv::s3://…``, every link is checked.
    """
    return any(_link_holds_secret(link) for link in _CHAIN.split(text))


def _link_holds_secret(link: str) -> bool:
    scheme, is_uri, rest = link.partition("://")
    if not is_uri:
        return False
    login, protocol = _login_of(scheme, rest), _protocol_of(scheme)
    # Web servers and NATS accept a token in place of the user.
    if login and (re.search("[:/?#]", login) or protocol in ("http", "https", "nats")):
        return True
    names = map(unquote_plus, re.findall("[?#&;]([^?#&;=]+)", rest))
    return any(_SECRET_NAME.search(name) and name.lower() not in _OTHER_NAMES for name in names)


def has_split_login(uri: str) -> bool:
    """Return whether a URI has an ``@`` after the one that ends its user and password for most programs."""
    scheme, _, rest = uri.partition("://")
    return "@" in _login_of(scheme, rest)


def _login_of(scheme: str, rest: str) -> str:
    """Return what may be the user and the password at the start of a URI; an empty string if there are none.

    A password that is not percent-encoded may contain any character, and begin like a port. So an ``@`` behind the host
    ends a login, too, unless the protocol's paths may contain one.
    """
    protocol = _protocol_of(scheme)
    if protocol == "github":  # fsspec reads github://OWNER:REPOSITORY@REVISION
        return ""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    may_go_on = authority and (":" in authority or protocol not in _PATHS)
    return (rest if may_go_on else authority).rpartition("@")[0]


def _protocol_of(scheme: str) -> str:
    """Return the protocol of a scheme: ``https`` for ``dav+https``."""
    return re.split(r"[^a-z0-9]", scheme.lower())[-1]


def hide_secrets(text: str) -> str:
    """Return the text with every URI that holds a secret reduced to scheme, host and path."""
    return re.sub(r"[\w+.-]+://\S+", lambda uri: without_secrets(uri[0]) if holds_secret(uri[0]) else uri[0], text)


def shown(value: object) -> str:
    """Return the ``repr`` of a value for messages, without the secrets of its URIs."""
    # A URI alone may contain spaces, which within a sentence end it.
    is_secret = isinstance(value, str) and holds_secret(value)
    return hide_secrets(repr(without_secrets(str(value)) if is_secret else value))


def without_secrets(location: str) -> str:
    """Return a location, which may contain spaces, reduced to scheme, host and path. A path stays as it is."""
    return "".join(map(_link_without_secrets, _CHAIN.split(location)))


def _link_without_secrets(link: str) -> str:
    scheme, is_uri, rest = link.partition("://")
    if not is_uri:
        return link
    login = _login_of(scheme, rest)
    shown = rest[len(login) :].removeprefix("@") if login else rest
    return scheme + is_uri + re.split("[?#;]", shown, maxsplit=1)[0]
