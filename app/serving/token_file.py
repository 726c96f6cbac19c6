"""The endpoint's token, in a file that only its owner reads."""

import contextlib
import os
import re
import secrets
import tempfile
from pathlib import Path

from app.errors import ClusterError
from app.storage import HOME

ENDPOINT_TOKEN_FILE = HOME / "endpoint_token"
"""Where Rayloom keeps the token that it has made; it outlives the cluster, for clients know it."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{32,}=*")
_ADVICE = "'umask 077; openssl rand -hex 32 > FILE' makes one"


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        ClusterError: there is no such file, others could read it, or it holds no token.
    """
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ClusterError(f"the token's file {str(path)!r} cannot be read ({reason}): {_ADVICE}") from error
    if mode & 0o077:
        raise ClusterError(f"the token's file {str(path)!r} has mode {mode:o}, so others can read it: expected 600")
    if not _TOKEN.fullmatch(token):
        raise ClusterError(
            f"the token's file {str(path)!r} holds no token: expected 32 or more of the characters that a header may "
            f"carry (letters, digits and -._~+/); {_ADVICE}"
        )
    return token


def make_token(path: Path) -> str:
    """The token in a file, which is made with a new one if there is none.

    Raises:
        ClusterError: as ``read_token``, or the file cannot be made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8") as file:  # of mode 600
            file.write(secrets.token_hex(32))
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)  # whole, or not at all, also when two of us make it
    except OSError as error:
        raise ClusterError(
            f"the token's file {str(path)!r} cannot be made ({error.strerror}): name one with serve.token_file"
        ) from error
    return read_token(path)
