"""Requests of one stream, answered side by side."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

Given = TypeVar("Given")
Answer = TypeVar("Answer")


async def in_order(
    given: AsyncIterator[Given], answer: Callable[[Given], Coroutine[Any, Any, Answer]], most: int
) -> AsyncGenerator[Answer, None]:
    """The answers to all that is given, in its order, of which ``most`` are under way at a time.

    When this is closed, those that are under way are cancelled. What ``given`` or ``answer`` raises ends it.
    """
    answers: asyncio.Queue[asyncio.Task[Answer] | None] = asyncio.Queue()
    room = asyncio.Semaphore(most)
    under_way: set[asyncio.Task[Any]] = set()

    def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        return task

    async def read() -> None:
        try:
            async for each in given:
                await room.acquire()
                answers.put_nowait(started(answer(each)))
        finally:
            answers.put_nowait(None)

    reading = started(read())
    try:
        while (task := await answers.get()) is not None:
            yield await task
            room.release()
        await reading
    finally:
        for task in list(under_way):
            task.cancel()
