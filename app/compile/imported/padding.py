"""Checks of an imported model's tokenizer: whether texts fit the model, and whether padding changes its answers."""

from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from app.data.processor import Processor
from app.data.text import TextProcessor
from app.data.tokenizer import PROBES
from app.engines.base import Engine
from app.errors import CompileError, EngineError, first_line
from app.tensors import Tensors, slice_rows

_TEXT, _LONGEST_TEXT = "film", "a good film " * 2**13
"""A short text shows the effect of padding best, because padding is next to every token."""


def choose_padding_side(
    processor: TextProcessor, engine: Engine, scores: str, folder: str, max_difference: float
) -> TextProcessor:
    """Return the processor, which pads on the side that does not change the model's answer.

    A short text is run alone, and padded as beside the longest text. ``max_difference`` is relative to
    the larger scores of the two. The engine is closed.

    Raises:
        CompileError: padding changes the answer on either side, or the model cannot run the longest text.
    """
    with closing(engine):
        for candidate in (processor, processor.changed(padding_side="left")):
            rows = candidate.encode([_TEXT, _LONGEST_TEXT])
            padded, longest = slice_rows(rows, 0, 1), slice_rows(rows, 1, 2)
            alone = {name: tensor[:, padded["attention_mask"][0] > 0] for name, tensor in padded.items()}
            try:
                expected, given, others = (
                    engine.run(tensors)[scores].astype(np.float64) for tensors in (alone, padded, longest)
                )
            except EngineError as error:
                raise CompileError(
                    f"the model cannot run texts of {longest['input_ids'].shape[1]} tokens, which the tokenizer of "
                    f"{folder!r} makes ({first_line(error)}): give the model's own, or lower its model_max_length"
                ).of("tokenizer.too_long") from error
            # The score of one text may be 0 by chance.
            if _rms(given - expected) <= max_difference * max(_rms(expected), _rms(others)):
                return candidate
    raise CompileError(
        "the model reads the padding of a text, whichever side it is on, so longer texts beside it would change its "
        "answer: export it so that attention_mask hides padding everywhere, or import it without a tokenizer and send "
        "tensors without padding"
    ).of("padding.not_masked")


def require_same_inputs(own: Processor, given: Processor, folder: str) -> None:
    """Raise CompileError if a tokenizer that was given makes other tokens than the model's own."""
    if own.modality != "text" or given.modality != "text":
        return
    for text in PROBES:
        theirs, ours = (processor.encode([text]) for processor in (own, given))
        if not all(np.array_equal(theirs[name], ours[name]) for name in theirs):
            raise CompileError(
                f"the tokenizer of {folder!r} makes {_tokens(ours)} of {text!r}, and the model's own "
                f"{_tokens(theirs)}: leave out --processor, or remove the model's own tokenizer from its folder"
            ).of("tokenizer.differs", "--processor")


def _rms(scores: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(np.square(scores))))


def _tokens(tensors: Tensors) -> str:
    return str(tensors["input_ids"][0].tolist())
