"""Measure prediction with the kernels that oneDNN keeps: seconds and memory, for texts alone and in small batches.

$ export LRU_CACHE_CAPACITY=32 ONEDNN_PRIMITIVE_CACHE_CAPACITY=32 OMP_NUM_THREADS=1
$ python -m tests.inference.keep_kernels RUN fp32

RUN is a classifier. Prints a line with milliseconds for each text alone, seconds for all in batches, and the largest
memory of the process. Not a test: it takes 20 seconds, and both variables at 1024 are the other side.
"""

import random
import resource
import sys
import time

from bertkit.inference.predictor import Predictor

SENTENCE = "the film was a warm and funny story about people in small towns who never give up"
TEXTS, ROUNDS = 400, 4
LENGTHS, BATCHES = (3, 120), (2, 12)  # words of a text, and texts of a batch


def measure(predictor: Predictor, texts: list[str]) -> tuple[float, float]:
    """Return the seconds of all texts one by one, and in batches of different sizes."""
    began = time.perf_counter()
    for text in texts:
        predictor([text])
    between = time.perf_counter()
    draw, start = random.Random(2), 0
    while start < len(texts):
        size = draw.randint(*BATCHES)
        predictor(texts[start : start + size])
        start += size
    return between - began, time.perf_counter() - between


if __name__ == "__main__":
    predictor, draw = Predictor(sys.argv[1], precision=sys.argv[2]), random.Random(1)
    texts = [" ".join(draw.choices(SENTENCE.split(), k=draw.randint(*LENGTHS))) for _ in range(TEXTS)]
    rounds = [measure(predictor, texts) for _ in range(ROUNDS)]
    alone = [f"{1000 * seconds / TEXTS:.2f}" for seconds, _ in rounds]
    together = [f"{seconds:.2f}" for _, seconds in rounds]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(f"alone {', '.join(alone)} ms; together {', '.join(together)} s; {memory:.0f} MB")
