"""Answer the waiting inputs of all connections together: one thread runs the model on batches of limited size.

A batch is formed as soon as the model is free, from the inputs that wait by then; no input waits for others. Requests
take turns, so a request with many inputs does not hold up the others, and the results of each keep its order.

Left out: how inputs arrive, and their limits (`bertkit.inference.server`).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any

from bertkit.data.formats.rows import Line
from bertkit.tasks.task import Result

CHARACTERS_A_TOKEN = 4.0  # of English; the first guess
BEFORE_ENDINGS = ("context", "start", "sent1", "sent2")  # keys of SWAG whose texts go with each ending
KEPT_WEIGHT = 0.8  # weight of earlier batches in the measured characters per token

AnswerBatch = Callable[[list[Any]], tuple[list[Result], int]]


class Busy(Exception):
    """Too many inputs are waiting."""


@dataclass(eq=False)
class Pending:
    """The inputs of a request, and the results so far.

    Attributes:
        given: Position in `inputs` of the next one to be answered.
        left: Number of inputs without a result.
    """

    inputs: Sequence[Any]
    done: asyncio.Future
    results: list[Result] = field(default_factory=list)
    given: int = 0
    left: int = 0


class Batcher:
    """A queue of inputs in front of a model.

    Args:
        answer: Returns the results of some inputs, and the number of their tokens.
        most_tokens: Tokens of a batch, which bound the time that an input waits for the batch before it. The number is
            estimated from the characters, by the tokens and characters of the latest batches. An input with more is a
            batch of its own.
        most_waiting: Inputs that may wait.
        note: Receives the inputs and the tokens of each batch.
        report: Receives the name of an unexpected exception; its message may quote an input.
    """

    def __init__(
        self,
        answer: AnswerBatch,
        most_tokens: int,
        most_waiting: int,
        note: Callable[[int, int], None],
        report: Callable[[str], None],
    ) -> None:
        self.answer_batch, self.most_tokens, self.most_waiting = answer, most_tokens, most_waiting
        self.note, self.report = note, report
        self.waiting = 0
        self.characters_a_token = CHARACTERS_A_TOKEN
        self.jobs: deque[Pending] = deque()
        self.changed = Condition()
        self.is_closed = False
        self.thread = Thread(target=self._work, name="predictor", daemon=True)

    def start(self) -> None:
        """Start the thread that runs the model."""
        self.thread.start()

    def close(self) -> None:
        """End the thread after its current batch."""
        with self.changed:
            self.is_closed = True
            self.changed.notify()
        self.thread.join()

    async def answer(self, inputs: Sequence[Any]) -> list[Result]:
        """Return the results of the inputs, in order. If this is cancelled, the remaining inputs are dropped.

        Raises:
            Busy: Too many inputs are waiting.
        """
        if not inputs:
            return []
        job = Pending(inputs, asyncio.get_running_loop().create_future(), [{}] * len(inputs), left=len(inputs))
        with self.changed:
            if self.waiting + len(inputs) > self.most_waiting:
                raise Busy
            self.waiting += len(inputs)
            self.jobs.append(job)
            self.changed.notify()
        try:
            return await job.done
        finally:
            with self.changed:
                if job.given < len(inputs):  # it was cancelled, or one of its inputs has failed
                    self.jobs.remove(job)
                    self.waiting -= len(inputs) - job.given
                    job.given = len(inputs)

    def _work(self) -> None:
        """Answer batches until the queue is closed."""
        while batch := self._take():
            results = self._try([job.inputs[place] for job, place in batch])
            loop = batch[0][0].done.get_loop()
            loop.call_soon_threadsafe(deliver, batch, results)

    def _take(self) -> list[tuple[Pending, int]]:
        """Wait for inputs and return a batch of them, one of each request in turn; empty if the queue is closed."""
        with self.changed:
            while True:
                batch: list[tuple[Pending, int]] = []
                room = self.most_tokens * self.characters_a_token
                while self.jobs:
                    job = self.jobs[0]
                    room -= count_characters(job.inputs[job.given])
                    if batch and room < 0:
                        break
                    batch.append((job, job.given))
                    job.given += 1
                    self.waiting -= 1
                    self.jobs.popleft()
                    if job.given < len(job.inputs):
                        self.jobs.append(job)
                if batch or self.is_closed:
                    return batch
                self.changed.wait()

    def _try(self, inputs: list[Any]) -> list[Result | Exception]:
        """Return the result of each input; after an exception each is tried alone, so that it spoils no other."""
        try:
            results, tokens = self.answer_batch(inputs)
        except Exception as error:
            if len(inputs) > 1:
                return [result for given in inputs for result in self._try([given])]
            self.report(type(error).__name__)
            return [error]
        if tokens:
            found = count_characters(inputs) / tokens
            self.characters_a_token = KEPT_WEIGHT * self.characters_a_token + (1 - KEPT_WEIGHT) * found
        self.note(len(inputs), tokens)
        return list(results)


def deliver(batch: Sequence[tuple[Pending, int]], results: Sequence[Mapping[str, Any] | Exception]) -> None:
    """Hand the results of a batch to their requests, in the thread of the event loop."""
    for (job, place), result in zip(batch, results, strict=True):
        if job.done.done():  # it was cancelled, or another of its inputs has failed
            continue
        if isinstance(result, Exception):
            job.done.set_exception(result)
            continue
        job.results[place] = result
        job.left -= 1
        if not job.left:
            job.done.set_result(job.results)


def cut_into_chunks(inputs: Iterable[Any], most: int, enough: int) -> Iterator[list[Any]]:
    """Yield lists of inputs; a list ends at `most` inputs, or when it reaches `enough` characters."""
    chunk, characters = [], 0
    for given in inputs:
        chunk.append(given)
        characters += count_characters(given.value if isinstance(given, Line) else given)
        if len(chunk) == most or characters >= enough:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def count_characters(given: Any) -> int:
    """Count the characters of an input's texts, and one more for each element of a list.

    The texts that all endings of SWAG have in common count once per ending.
    """
    if isinstance(given, str):
        return len(given)
    if isinstance(given, Mapping):
        listed = given.get("endings")
        endings = len(listed) if isinstance(listed, list) else sum(str(name).startswith("ending") for name in given)
        shared = sum(count_characters(given.get(name)) for name in BEFORE_ENDINGS)
        return sum(map(count_characters, given.values())) + max(endings - 1, 0) * shared
    if not isinstance(given, list | tuple):
        return 0
    return sum(map(count_characters, given)) + len(given)
