"""What a model takes."""

import numpy as np
import pytest

from app.config import DataConfig
from app.data.text import TextProcessor
from app.tensors import check_tensors
from tests.wording import refused

PROCESSOR = TextProcessor.fit(["some text"] * 2, DataConfig(source="-", buckets=[8]))


@pytest.mark.parametrize(
    ("ids", "rule"),
    [
        (np.full((1, 8), 10**6), "tensor.range"),
        (np.full((1, 8), -1), "tensor.range"),
        (np.ones((1, 9), np.int64), "tensor.shape"),
        (np.ones((0, 8), np.int64), "tensor.shape"),
    ],
)
def test_tokens_that_the_model_does_not_know_are_refused(ids: np.ndarray, rule: str) -> None:
    with refused(rule, "input_ids"):
        check_tensors({"input_ids": ids, "attention_mask": np.ones_like(ids)}, PROCESSOR.inputs)
