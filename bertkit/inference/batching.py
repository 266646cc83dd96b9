"""Answer the waiting inputs of all connections together: one thread runs the model on batches of limited size.

A batch is formed as soon as the model is free, from the inputs that wait by then; no input waits for others. Requests
take turns, so a request with many inputs does not hold up the others, and the results of each keep its order.

Left out: how inputs arrive, and their limits (`bertkit.inference.server`).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Condition, Thread
from typing import Any

from bertkit.data.formats.rows import LocatedInput
from bertkit.tasks.answers import Result

CHARACTERS_A_TOKEN = 4  # characters of a token of English

Waiting = tuple[Any, asyncio.Future]  # an input, and its result to come


class Batcher:
    """A queue of inputs in front of a model.

    Args:
        answer: Returns the results of some inputs.
        most_tokens: Tokens of a batch, estimated from the characters, which bound the time that an input waits for the
            batch before it. An input with more is a batch of its own.
        most_waiting: Inputs that may wait.
    """

    def __init__(self, answer: Callable[[list[Any]], list[Result]], most_tokens: int, most_waiting: int) -> None:
        self.answer_batch, self.most_waiting = answer, most_waiting
        self.most_characters = most_tokens * CHARACTERS_A_TOKEN
        self.waiting = 0
        self.requests: deque[deque[Waiting]] = deque()
        self.changed = Condition()
        self.is_closed = False
        self.thread = Thread(target=self._work, name="predictor", daemon=True)

    def close(self) -> None:
        """End the thread after its current batch."""
        with self.changed:
            self.is_closed = True
            self.changed.notify()
        self.thread.join()

    async def answer(self, inputs: Sequence[Any]) -> list[Result]:
        """Return the results of the inputs, in order. If this is cancelled, the remaining inputs are skipped.

        Raises:
            asyncio.QueueFull: Too many inputs are waiting.
        """
        loop = asyncio.get_running_loop()
        with self.changed:
            if self.waiting + len(inputs) > self.most_waiting:
                raise asyncio.QueueFull
            request = deque((given, loop.create_future()) for given in inputs)
            results = [result for _, result in request]
            if request:
                self.waiting += len(inputs)
                self.requests.append(request)
                self.changed.notify()
        return await asyncio.gather(*results)

    def _work(self) -> None:
        """Answer batches until the queue is closed."""
        while not self.is_closed:
            if batch := self._take():
                results = self._try([given for given, _ in batch])
                batch[0][1].get_loop().call_soon_threadsafe(deliver, batch, results)

    def _take(self) -> list[Waiting]:
        """Wait for inputs and return a batch of them, one of each request in turn; empty if none is wanted any more."""
        batch: list[Waiting] = []
        with self.changed:
            self.changed.wait_for(lambda: self.requests or self.is_closed)
            room = self.most_characters
            while self.requests:
                given, result = self.requests[0][0]
                if not result.cancelled():
                    room -= count_characters(given)
                    if batch and room < 0:
                        break
                    batch.append((given, result))
                request = self.requests.popleft()
                request.popleft()
                self.waiting -= 1
                if request:
                    self.requests.append(request)
        return batch

    def _try(self, inputs: list[Any]) -> list[Result | Exception]:
        """Return the result of each input; after an exception each is tried alone, so that it spoils no other."""
        try:
            return list(self.answer_batch(inputs))
        except Exception as error:
            return [error] if len(inputs) == 1 else [result for given in inputs for result in self._try([given])]


def deliver(batch: Sequence[Waiting], found: Sequence[Result | Exception]) -> None:
    """Hand the results of a batch to their requests, in the thread of the event loop."""
    for (_, result), value in zip(batch, found, strict=True):
        if result.done():  # the request was cancelled
            continue
        if isinstance(value, Exception):
            result.set_exception(value)
        else:
            result.set_result(value)


def cut_into_chunks(inputs: Iterable[Any], most: int, enough: int) -> Iterator[list[Any]]:
    """Yield lists of inputs; a list ends at `most` inputs, or when it reaches `enough` characters."""
    chunk, characters = [], 0
    for given in inputs:
        chunk.append(given)
        characters += count_characters(given.value if isinstance(given, LocatedInput) else given)
        if len(chunk) == most or characters >= enough:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def count_characters(given: Any) -> int:
    """Count the characters of an input's texts, and one more for each part of a list or an object."""
    if isinstance(given, str):
        return len(given)
    if isinstance(given, Mapping):
        given = given.values()
    elif not isinstance(given, list | tuple):
        return 0
    return sum(map(count_characters, given)) + len(given)
