"""Bodies in JSON that are parsed by pydantic: everything but inference."""

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from app.errors import RequestError

Body = TypeVar("Body", bound=BaseModel)


class ErrorBody(BaseModel):
    """What a refused request is answered."""

    error: str


def parse_body(model: type[Body], body: bytes) -> Body:
    """Read a JSON body; an empty one is ``{}`` to a model that requires nothing.

    Raises:
        RequestError: it says what is wrong and where.
    """
    if not body and not any(field.is_required() for field in model.model_fields.values()):
        body = b"{}"
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(model, error) from None


def check_fields(model: type[Body], fields: Mapping[str, object]) -> Body:
    """The same of a message's fields. Raises RequestError that says what is wrong and where."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _refusal(model, error) from None


def _refusal(model: type[Body], error: ValidationError) -> RequestError:
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"]) or "the body"
    return RequestError(f"{where[:200]}: {problem['msg']}; expected JSON of the form of {model.__name__}")
