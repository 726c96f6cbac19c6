"""Sentence embeddings: vectors of texts, near each other if the texts belong together."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from app.config import Recipe, TrainConfig
from app.data.prepared import PreparedData, SplitData
from app.data.targets import Answer, Outputs
from app.data.text import TextProcessor
from app.data.vectors import Vectors
from app.errors import RecipeError
from app.pretrained import PretrainedFolder, open_pretrained
from app.tasks.base import Encoded, Loss, ServedTask
from app.tasks.features import TOKENS
from app.tasks.metrics import Metric

if TYPE_CHECKING:  # an endpoint answers without torch
    from torch import Tensor

    from app.data.preparation.prepare import RunUnits
    from app.data.preparation.samples import SampleKind
    from app.tasks.judgement import Judge

_STEPS = ("Transformer", "Pooling", "Normalize")
"""Modules of sentence-transformers that this task implements. It always scales vectors to length 1."""


class Retrieval(Metric):
    """How well anchors find their own positives among all positives of a split, by cosine."""

    of_loss = True

    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        """Return the vectors at their places. ``targets``: the index of each row and the number of all, (rows, 2)."""
        from app.tasks.contrastive import stack_vectors

        return stack_vectors(outputs, targets[:, 0], int(targets[0, 1]))

    def ranks(self, sums: "Tensor") -> "Tensor":
        """Return the rank of each anchor's own positive, from 1, of shape (anchors,). A tie counts as worse."""
        from app.tasks.contrastive import cosines

        found = cosines(sums)
        return (found >= found.diagonal()[:, None]).sum(1)


class RecallAt1(Retrieval):
    """Share of the anchors whose nearest positive is their own."""

    name = "recall_at_1"

    def value(self, sums: "Tensor") -> float:
        return self.of_ranks(self.ranks(sums))

    def of_ranks(self, ranks: "Tensor") -> float:
        """Return the metric of anchors whose own positives have these ranks."""
        return float((ranks == 1).double().mean())


class MeanReciprocalRank(Retrieval):
    """Mean of 1 / rank of the own positive (MRR)."""

    name = "mrr"

    def value(self, sums: "Tensor") -> float:
        return float(self.ranks(sums).double().reciprocal().mean())


class SentenceEmbedding(ServedTask):
    """Vectors of texts, learned from pairs of texts with the other pairs of the batch as negatives."""

    processor = TextProcessor
    targets = Vectors
    metrics = (RecallAt1(), MeanReciprocalRank())
    ignored = ("tokens",)  # of the text, by each version's tokenizer
    # Vectors of whole batches are compared, which no split model has.
    supports = TOKENS | {"shards", "stream", "pairs", "near duplicates", "test split", "curriculum", "pretrained model"}

    def batch_loss(self, config: TrainConfig, data: PreparedData) -> Loss:
        from app.tasks.contrastive import Contrastive

        return Contrastive(config.temperature, len(data.validation), data.facts["dimensions"])

    @property
    def data(self) -> type[SplitData]:
        from app.data.pairs import PairData  # an endpoint reads no data

        return PairData

    def prepare(self, recipe: Recipe, run_units: "RunUnits" = map) -> PreparedData:
        from app.data.preparation.data import prepare_pairs

        return prepare_pairs(recipe, self.processor, Vectors(_dimensions_of(recipe)), run_units)

    def samples(self, recipe: Recipe) -> "SampleKind":  # noqa: ARG002
        from app.data.preparation.samples import Pairs

        return Pairs()

    def judge(self, recipe: Recipe, data: PreparedData) -> "Judge | None":
        from app.tasks.judgement.pairs import PairJudge

        return PairJudge.of(recipe, self, data.train)

    def answer_natural(self, outputs: NDArray[np.float32], targets: Outputs, given: Encoded) -> list[Answer]:
        """Return the vector of each text, and how many tokens the text has."""
        tokens = given.tensors["attention_mask"].sum(1).tolist()
        return [{**answer, "tokens": n} for answer, n in zip(self.answer(outputs, targets), tokens, strict=True)]


def _dimensions_of(recipe: Recipe) -> int:
    """Return the size of the model's vectors.

    Raises:
        RecipeError: the recipe does not say it.
    """
    model = recipe.model
    if model.factory is None and model.source is not None:
        folder = open_pretrained(model.source)
        _require_mean(folder)
        given = model.args.get("hidden_size", folder.config.get("hidden_size"))
        if not isinstance(given, int):
            raise RecipeError(
                f"model.pretrained {model.pretrained!r} has no hidden_size in its config.json, which is the size of a "
                "vector: name a factory that returns vectors, with model.args.dimensions"
            ).of("hidden_size.missing", "model.pretrained")
        return given
    dimensions = model.args.get("dimensions")
    if not isinstance(dimensions, int) or dimensions < 1:
        raise RecipeError(
            f"model.args.dimensions is {dimensions!r}: task {recipe.task} needs the size of the model's vectors, such "
            "as 128"
        ).of("dimensions.missing", "model.args.dimensions")
    return dimensions


def _require_mean(folder: PretrainedFolder) -> None:
    """Raise RecipeError if the folder's vectors are not the mean over the tokens in sentence-transformers."""
    for step in folder.sentence_steps:
        if step.kind not in _STEPS or step.pooling not in (None, "mean"):
            what = f"{step.pooling} pooling" if step.pooling else f"a module {step.kind}"
            raise RecipeError(
                f"{folder} makes its vectors with {what} (modules.json), and this task with the mean over the tokens: "
                "give a model with mean pooling, or a factory that returns vectors, with model.args.dimensions"
            ).of("pretrained.pooling", "model.pretrained")
