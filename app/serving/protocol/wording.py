"""Words that errors share, and how they quote what a client sent."""

from reprlib import Repr

_QUOTES = Repr()
_QUOTES.maxlevel, _QUOTES.maxlist, _QUOTES.maxstring, _QUOTES.maxother = 2, 8, 80, 80

AS_BYTES = "ask for it with the parameter 'binary_data' true"
"""What to do about an output that JSON cannot say."""


def shown(given: object) -> str:
    """As Python writes it, but short, however large it is."""
    return _QUOTES.repr(given)
