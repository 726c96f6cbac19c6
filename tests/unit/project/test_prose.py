"""The measure of prose that 'make docs' takes of the pages."""

import pytest

from docs.prose import Prose, sentences


def test_only_sentences_count() -> None:
    page = """# A heading of four words

(a-target)=

One [linked](https://example.org/some/path) word, and `code of three`. Is this
one more? Short one.

| a table | with words in it |
| --- | --- |

- An item without a stop
- and the next; they are one.

```bash
rayloom up and down again.
```
"""
    assert sentences(page) == [
        "One linked word, and code of three.",
        "Is this one more?",
        "An item without a stop and the next; they are one.",
    ]


def test_figures_of_prose() -> None:
    prose = Prose("page", ("one two three", "one two; three four", "one two three four five"))
    assert (prose.median, prose.p90, round(prose.semicolons)) == (4, 4, 33)
    assert not prose.is_readable


@pytest.mark.parametrize("sentence", ["word " * 16, "a; b; c"])
def test_dense_prose_is_not_readable(sentence: str) -> None:
    assert not Prose("page", (sentence,) * 9).is_readable
