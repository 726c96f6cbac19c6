"""Language modelling and chats: the next token. Their models generate tokens when they are served."""

import math
from typing import TYPE_CHECKING, ClassVar

from upath import UPath

from app.config import Recipe
from app.data.prepared import PreparedData
from app.errors import RecipeError
from app.tasks.base import Task
from app.tasks.features import MODEL, Features
from app.tasks.metrics import Accuracy, Metric

if TYPE_CHECKING:
    from torch import Tensor

    from app.data.language import LanguageData
    from app.data.preparation.prepare import RunUnits
    from app.data.preparation.samples import TokenKind
    from app.tasks.judgement import Judge


_BYTE_TOKENS = 257
"""One for each byte and one for the end of a document."""
_MAX_EXPONENT = 700.0
"""exp of more is too large for a float."""


class Perplexity(Metric):
    """exp of the mean cross-entropy in nats."""

    name, mode = "perplexity", "min"
    of_loss = True

    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        """Return the sum of the cross-entropies and the number of targets, of shape (2,)."""
        from app.tasks.objective import CrossEntropy

        return CrossEntropy().sums(outputs, targets)

    def value(self, sums: "Tensor") -> float:
        loss = super().value(sums)
        return math.inf if loss >= _MAX_EXPONENT else math.exp(loss)


class LanguageModeling(Task):
    """Documents, of which each token is predicted from those before it."""

    metrics = (Perplexity(), Accuracy())
    learns_classes = True
    served_as = "tokens"
    supports: ClassVar[Features] = MODEL | {
        *("shards", "sources", "stream", "groups", "input column", "blocks", "tokenizer", "plain bytes", "test split"),
        *("text filters", "near duplicates", "token batches", "label smoothing"),
    }

    def require(self, recipe: Recipe) -> None:
        super().require(recipe)
        if (size := recipe.data.tokenizer.vocab_size) < _BYTE_TOKENS:
            raise RecipeError(
                f"data.tokenizer.vocab_size is {size}: task {recipe.task} needs {_BYTE_TOKENS} or more, one for each "
                "byte and one for the end of a document"
            ).of("tokenizer.too_small", "data.tokenizer.vocab_size")

    @property
    def data(self) -> "type[LanguageData]":
        """The type of the data that ``prepare`` returns and runs keep."""
        from app.data.language import LanguageData  # an endpoint reads no data

        return LanguageData

    def samples(self, recipe: Recipe) -> "TokenKind":  # noqa: ARG002
        from app.data.preparation.samples import Documents

        return Documents()

    def judge(self, recipe: Recipe, data: PreparedData) -> "Judge | None":
        from app.tasks.judgement.tokens import TokenJudge

        return TokenJudge.of(recipe, self, data.train, data.facts["vocab_size"])

    def prepare(self, recipe: Recipe, run_units: "RunUnits" = map) -> PreparedData:
        from app.data.preparation.data import prepare_tokens

        return prepare_tokens(recipe, self.samples(recipe), self.data, run_units)

    def load(self, recipe: Recipe, folder: UPath) -> "LanguageData":  # noqa: ARG002
        return self.data.load(folder)

    def load_with_test(self, recipe: Recipe, folder: UPath) -> "LanguageData":
        return self.load(recipe, folder).with_test()


class Chat(LanguageModeling):
    """Conversations, of which the assistant's tokens are predicted."""

    supports = MODEL | {
        *("shards", "sources", "stream", "groups", "blocks", "conversations", "test split"),
        *("token batches", "curriculum", "label smoothing"),
    }

    def require(self, recipe: Recipe) -> None:
        super().require(recipe)
        if recipe.model.pretrained is None:
            raise RecipeError(
                f"task {recipe.task} needs model.pretrained, whose tokenizer and chat template it uses: set it"
            ).of("recipe.missing", "model.pretrained")

    @property
    def data(self) -> "type[LanguageData]":
        from app.data.chat import ChatData

        return ChatData

    def samples(self, recipe: Recipe) -> "TokenKind":
        from app.data.preparation.samples import Conversations

        return Conversations.of(recipe)
