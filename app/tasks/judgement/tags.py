"""The judge of taggers, whose baselines are the most frequent tag overall and the most frequent tag of each word."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from app.config import Recipe
from app.data.labelled import LabelledDataset
from app.data.prepared import IGNORED, Dataset
from app.data.tags import Tags
from app.tasks.base import ServedTask
from app.tasks.judgement.base import places_of
from app.tasks.judgement.rows import num_texts
from app.tasks.judgement.sums import RowSums, SumsJudge
from app.tasks.metrics import Metric

_ROWS = 64


@dataclass(frozen=True)
class TagJudge(SumsJudge):
    """Judges models that give each word a tag."""

    metric: Metric
    train: LabelledDataset
    targets: Tags

    @classmethod
    def of(cls, recipe: Recipe, task: ServedTask, train: Dataset) -> "TagJudge | None":
        """Return the judge of a recipe; None for a stream, whose texts are no longer available."""
        if recipe.data.stream or not isinstance(train, LabelledDataset) or not isinstance(train.targets, Tags):
            return None
        metric = task.gate_of(train.targets)
        return cls(metric, train, train.targets) if metric else None

    def baselines(self, split: Dataset) -> Sequence[RowSums]:
        assert isinstance(split, LabelledDataset)
        by_word: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for words, tags in self._read(self.train):
            for word, tag in zip(words, tags.tolist(), strict=True):
                by_word[word][tag] += 1
        ((majority, _),) = sum(by_word.values(), Counter[int]()).most_common(1)
        best = {word: counts.most_common(1)[0][0] for word, counts in by_word.items()}
        constant, memory = [], []
        for words, tags in self._read(split):
            constant.append(self._sums([majority] * len(words), tags))
            memory.append(self._sums([best.get(word, majority) for word in words], tags))
        return [
            RowSums(f"the most frequent tag {self.targets.labels[majority]}", torch.stack(constant)),
            RowSums("the most frequent tag of each word", torch.stack(memory)),
        ]

    def _sums(self, chosen: Sequence[int], tags: Tensor) -> Tensor:
        """Return the metric's sums for one text, with the ``chosen`` tags of its words and the true ``tags``."""
        outputs = functional.one_hot(torch.tensor(chosen, dtype=torch.int64), self.targets.num_outputs).float()
        return self.metric.sums(outputs[None], tags[None]).double()

    def _read(self, split: LabelledDataset) -> Iterator[tuple[list[str], Tensor]]:
        """Yield the words that the model reads of some texts, with their tags."""
        places = places_of(split, num_texts(split))
        for first in range(0, len(places), _ROWS):
            chunk = places[first : first + _ROWS]
            texts, _ = split.split.take(chunk)
            targets = torch.from_numpy(split.batch(chunk).targets)
            for words, row in zip(self.targets.read_words(split.processor, texts), targets, strict=True):
                yield words, row[row != IGNORED]
