"""Work that every process does, and that fails in all of them if it fails in one."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from app.errors import RayloomError

T = TypeVar("T")


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """What ``work`` answers in every process of ``group``, by rank.

    Raises:
        RayloomError: the first that ``work`` raised in any process, in all of them; nobody waits for one that failed.
    """
    try:
        answer: T | RayloomError = work()
    except RayloomError as error:
        answer = error
    answers: list[T | RayloomError | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, answer, group=group)
    for each in answers:
        if isinstance(each, RayloomError):
            raise each
    return cast("list[T]", answers)
