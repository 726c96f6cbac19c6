"""The list of models behind OpenAI's routes.

https://developers.openai.com/api/reference/resources/models
"""

from typing import Literal, Self

from pydantic import BaseModel

from app.repository.manifest import Manifest


class Model(BaseModel):
    """A model. A request names it by ``id``."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """When its version was published, in seconds since 1970."""
    owned_by: str = "rayloom"
    version: str
    """The version that answers. A request for NAME/VERSION gets another served one."""
    max_model_len: int | None = None
    """Maximum tokens of a prompt and its answer, as vLLM names it; None if the model answers vectors."""
    has_chat: bool | None = None
    """Whether it answers chats, as its chat template says. Without one it continues texts."""

    @classmethod
    def of(cls, name: str, manifest: Manifest) -> Self:
        """Describe a version that is served as ``name``."""
        generation = manifest.generation
        return cls(
            id=name,
            created=int(manifest.created.timestamp()),
            version=str(manifest.version),
            max_model_len=generation.context_length if generation else None,
            has_chat=generation.has_chat if generation else None,
        )


class ModelList(BaseModel):
    """The models."""

    object: Literal["list"] = "list"
    data: list[Model]


def parse_name(model: str) -> tuple[str, str | None]:
    """Return the name and the version, if one is given, of NAME or NAME/VERSION."""
    name, slash, version = model.partition("/")
    return name, version if slash else None


def predict_path(model: str) -> str:
    """Return the path for the natural input of NAME or NAME/VERSION."""
    name, version = parse_name(model)
    return f"/v1/models/{name}/predict" if version is None else f"/v1/models/{name}/versions/{version}/predict"
