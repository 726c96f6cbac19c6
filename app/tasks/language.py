"""Language modelling and chats: the next token. Their models have a logit per token, and are not compiled."""

from upath import UPath

from app.config import Recipe
from app.data import language
from app.data.language import LanguageData
from app.data.prepared import PreparedData
from app.tasks.base import Task
from app.tasks.metrics import Accuracy, Perplexity


class LanguageModeling(Task):
    """Documents, of which each token is predicted from those before it."""

    metrics = (Perplexity(), Accuracy())
    learns_classes = True

    def prepare(self, recipe: Recipe) -> PreparedData:
        return language.prepare(recipe.data, recipe.model.pretrained)

    def load(self, recipe: Recipe, folder: UPath) -> PreparedData:  # noqa: ARG002
        return LanguageData.load(folder)


class Chat(LanguageModeling):
    """Conversations, of which the assistant's tokens are predicted."""

    def prepare(self, recipe: Recipe) -> PreparedData:
        from app.data import chat

        assert recipe.model.pretrained is not None
        return chat.prepare(recipe.data, recipe.model.pretrained)

    def load(self, recipe: Recipe, folder: UPath) -> PreparedData:
        from app.data.chat import ChatData

        return ChatData.load(folder, recipe.data)
