"""Token classification: which words of a text are entities, and of which type."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from app.config import Recipe
from app.data.prepared import IGNORED, PreparedData
from app.data.tags import Tags
from app.data.targets import Answer, Outputs
from app.data.text import TextProcessor
from app.tasks.base import Encoded, ServedTask
from app.tasks.features import MODEL, PREPARED, TOKENS
from app.tasks.metrics import Accuracy, Metric
from app.tensors import OUTPUT, TensorSpec

if TYPE_CHECKING:  # an endpoint answers without torch
    from torch import Tensor

    from app.data.preparation.samples import SampleKind
    from app.tasks.judgement import Judge


class EntityF1(Metric):
    """F1 of entities that are right in type, first and last word, over all rows (micro average).

    The definition is that of conlleval, and of seqeval's default mode. Words that were cut off do not count.
    """

    name, size = "entity_f1", 3

    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        """Return the numbers of right, of found and of true entities."""
        import torch

        counted = targets != IGNORED
        rows = counted.nonzero()[:, 0]
        true, found = targets[counted], outputs.argmax(-1)[counted]
        (begins, ends), (begins_here, ends_here) = _entities(true, rows), _entities(found, rows)
        both = begins & begins_here & ((true + 1) // 2 == (found + 1) // 2)
        return torch.stack([(both & (ends == ends_here)).sum(), begins_here.sum(), begins.sum()])

    def value(self, sums: "Tensor") -> float:
        right, found, true = sums.tolist()
        return float(2.0 * right / (found + true)) if found + true else 1.0


def _entities(tags: "Tensor", rows: "Tensor") -> tuple["Tensor", "Tensor"]:
    """Return where entities begin, bool, and for each of these words the index of the entity's last word; else -1.

    Args:
        tags: classes as ``app.data.tags`` numbers them, of shape (words,).
        rows: the row of each word, ascending, of the same shape.
    """
    import torch

    types = (tags + 1) // 2
    is_follower = torch.zeros_like(tags, dtype=torch.bool)
    is_follower[1:] = (tags[1:] > 0) & (tags[1:] % 2 == 0) & (types[1:] == types[:-1]) & (rows[1:] == rows[:-1])
    begins = (tags > 0) & ~is_follower
    is_last = tags > 0
    is_last[:-1] &= ~is_follower[1:]
    ends = torch.full_like(tags, -1)
    ends[begins] = is_last.nonzero()[:, 0]
    return begins, ends


class TokenClassification(ServedTask):
    """Words of texts, each with a class. The loss and the metrics count a word's first token alone."""

    processor = TextProcessor
    targets = Tags
    metrics = (EntityF1(), Accuracy())
    learns_classes = True
    ignored = ("score",)  # of each entity
    supports = (
        (PREPARED - {"label column"})
        | MODEL
        | TOKENS
        | {"tags", "named labels", "input column", "near duplicates", "token batches", "label smoothing"}
    )

    def output(self, targets: Outputs) -> TensorSpec:
        return TensorSpec(OUTPUT, np.dtype(np.float32), (-1, -1, targets.num_outputs))

    def judge(self, recipe: Recipe, data: PreparedData) -> "Judge | None":
        from app.tasks.judgement.tags import TagJudge

        return TagJudge.of(recipe, self, data.train)

    def answer_natural(self, outputs: NDArray[np.float32], targets: Outputs, given: Encoded) -> list[Answer]:
        """Return the entities of each text."""
        assert isinstance(targets, Tags)
        assert isinstance(given.processor, TextProcessor)
        texts = [str(text) for text in given.inputs]
        return [
            targets.entities(text, logits, given.processor.offsets(text))
            for text, logits in zip(texts, outputs, strict=True)
        ]

    def samples(self, recipe: Recipe) -> "SampleKind":  # noqa: ARG002
        from app.data.preparation.samples import TaggedTexts  # an endpoint reads no data

        return TaggedTexts(targets=self._targets)
