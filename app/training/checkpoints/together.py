"""Collective work: if it fails in one process, it fails in all."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from app.errors import RayloomError

T = TypeVar("T")


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run ``work`` in every process of ``group`` and return all results, by rank. Collective.

    Raises:
        RayloomError: ``work`` raised it in some process. The error of the lowest rank is raised in every process, so
            none waits for one that failed.
    """
    try:
        own: T | RayloomError = work()
    except RayloomError as error:
        own = error
    results: list[T | RayloomError | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(results, own, group=group)
    for result in results:
        if isinstance(result, RayloomError):
            raise result
    return cast("list[T]", results)
