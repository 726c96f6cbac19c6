"""The judge of sentence embeddings, whose baselines are a random order and shared character n-grams."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from app.best_effort import attempt
from app.config import Recipe
from app.data.pairs import HeldOutTexts, PairDataset
from app.data.prepared import Dataset
from app.tasks.base import ServedTask
from app.tasks.embedding import RecallAt1
from app.tasks.judgement.base import Judge, Predictions, places_of, share_interval, spread
from app.telemetry.judgement import Baseline, Judgement

_MAX_PAIRS, _MAX_CHARACTERS, _SAMPLED = 10_000, 8_000_000, 1_000
"""Maximum training pairs and characters that are read, and the number of pairs whose lengths estimate the total."""
_MAX_ANCHORS, _MAX_FEATURES, _ANCHORS = 2_000, 2**18, 128
"""Anchors that are compared with all positives, n-grams, and anchors per batch of comparisons."""


@dataclass(frozen=True)
class PairJudge(Judge):
    """Judges the share of anchors whose nearest positive is their own."""

    metric: RecallAt1
    train: PairDataset

    @classmethod
    def of(cls, recipe: Recipe, task: ServedTask, train: Dataset) -> "PairJudge | None":
        """Return the judge of a recipe; None for other metrics, and for streams, whose texts are not kept."""
        metric = task.metrics[0]
        if recipe.data.stream or not isinstance(metric, RecallAt1) or not isinstance(train, PairDataset):
            return None
        return cls(metric, train)

    def judge(
        self,
        name: str,
        split: Dataset,
        value: float,
        made: Iterable[Predictions],  # noqa: ARG002
        trained: Iterable[Predictions] = (),  # noqa: ARG002
    ) -> Judgement:
        """Judge as ``Judge.judge``. No predictions are read, because the split's score is a share of its anchors."""
        assert isinstance(split, HeldOutTexts)
        num_pairs = len(split.pairs)
        low, high = share_interval(value, num_pairs)
        return Judgement(
            metric=self.metric.name,
            mode=self.metric.mode,
            split=name,
            rows=num_pairs,
            value=value,
            low=low,
            high=high,
            trivial=Baseline(name="a random order", value=1 / num_pairs),
            linear=attempt(
                lambda: self._lexical(split), "the baseline of character n-grams cannot be fitted", "the job"
            ),
        )

    def _lexical(self, split: HeldOutTexts) -> Baseline:
        """Return the score of the cosine between character n-grams, with weights from training texts."""
        from sklearn.feature_extraction.text import TfidfVectorizer

        # Characters need no tokenizer, and suit every language.
        vectors = TfidfVectorizer(analyzer="char", ngram_range=(1, 3), sublinear_tf=True, max_features=_MAX_FEATURES)
        vectors.fit(text for pair in self._training_pairs() for text in pair)
        chosen = spread(len(split.pairs), _MAX_ANCHORS)
        positives = vectors.transform([positive for _, positive in split.pairs]).T.tocsr()
        anchors = vectors.transform([split.pairs[index][0] for index in chosen])
        ranks = []
        for first in range(0, len(chosen), _ANCHORS):
            own = chosen[first : first + _ANCHORS]
            cosines = (anchors[first : first + _ANCHORS] @ positives).toarray()
            ranks.append((cosines >= cosines[np.arange(len(own)), own][:, None]).sum(1))
        value = self.metric.of_ranks(torch.from_numpy(np.concatenate(ranks)))
        name = "the baseline of character n-grams"
        if len(chosen) == len(split.pairs):
            return Baseline(name=name, value=value)
        return share_interval(value, len(chosen)).baseline(name, value, self.metric)

    def _training_pairs(self) -> Iterable[tuple[str, str]]:
        lengths = [int(self.train.lengths[place]) for place in places_of(self.train, _SAMPLED)]
        longest = max(1.0, 2 * sum(lengths) / len(lengths))
        return self.train.pairs(places_of(self.train, min(_MAX_PAIRS, max(1, int(_MAX_CHARACTERS / longest)))))
