"""Secrets, read where training runs."""

import os
from pathlib import Path

from app.errors import DeliveryError


def read_secret(key: str, reference: str) -> str:
    """What ``reference``, ``env:NAME`` or ``file:/PATH``, points to; ``key`` is the recipe's, for the error.

    Raises:
        DeliveryError: there is no such variable or file on this node, or it is empty.
    """
    kind, _, where = reference.partition(":")
    try:
        secret = os.environ.get(where, "") if kind == "env" else Path(where).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DeliveryError(f"{key} is {reference}, which cannot be read here ({type(error).__name__})") from None
    if not secret:
        raise DeliveryError(f"{key} is {reference}, which is empty or not set here: set it on the cluster's nodes")
    return secret
