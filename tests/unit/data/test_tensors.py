"""What a model takes."""

import numpy as np
import pytest

from app.config import DataConfig
from app.data.text import TextProcessor
from app.errors import RequestError
from app.tensors import check_tensors

PROCESSOR = TextProcessor.fit(["some text"] * 2, DataConfig(source="-", buckets=[8]))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (np.full((1, 8), 10**6), "values from 1000000 to 1000000"),
        (np.full((1, 8), -1), "values from -1 to -1"),
        (np.ones((1, 9), np.int64), "has shape [1, 9]"),
        (np.ones((0, 8), np.int64), "has shape [0, 8]"),
    ],
)
def test_tokens_that_the_model_does_not_know_are_refused(ids: np.ndarray, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_tensors({"input_ids": ids, "attention_mask": np.ones_like(ids)}, PROCESSOR.inputs)
    assert words in str(refused.value)
