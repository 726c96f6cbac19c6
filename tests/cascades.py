"""Two published models for a cascade, trained on the same data."""

import numpy as np
import onnx
from onnx import numpy_helper
from upath import UPath

from app.artifacts import DATA
from app.data.targets import Classes
from app.repository.repository import Repository
from tests.engine_contract import PROCESSOR, SIGNATURE, TEXTS, exported
from tests.preparing import in_shards
from tests.toy import LABELS, publish_version

LEANING = np.array([0, 0, 2], np.float32)
"""By how much the logits of 'toy' are more than those of 'tiny'."""


def publish_stages(storage: UPath) -> UPath:
    """Put 'tiny' and 'toy' into production; of the 32 validation rows all are as 'toy' leans."""
    run, rows = storage / "runs/train/toy", [(text, LABELS[2]) for text in (*TEXTS, *TEXTS)]
    in_shards(storage / "data/toy", PROCESSOR, Classes(LABELS), train=rows, validation=rows).save(run / DATA)
    for name, model in (("tiny", exported()), ("toy", _leaning(exported()))):
        version = publish_version(storage, name, model, SIGNATURE, PROCESSOR, LABELS, train_run=str(run))
        Repository(storage).promote(name, version)
    return storage


def _leaning(content: bytes) -> bytes:
    model = onnx.load_from_string(content)
    bias = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("classifier.bias"))
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + LEANING, bias.name))
    return bytes(model.SerializeToString())
