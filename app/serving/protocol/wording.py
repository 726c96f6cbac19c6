"""How errors quote what a client sent."""

from reprlib import Repr

_QUOTES = Repr()
_QUOTES.maxlevel, _QUOTES.maxlist, _QUOTES.maxstring, _QUOTES.maxother = 2, 8, 80, 80


def shown(given: object) -> str:
    """As Python writes it, but short, however large it is."""
    return _QUOTES.repr(given)
