"""Memory that a process on a CPU keeps and gives back."""

import ctypes
import os
import subprocess
import sys

import pytest

from bertkit.system import memory
from bertkit.system.memory import Heap

GLIBC = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
LIBRARY = """
import ctypes, resource
from bertkit.system import memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def allocate(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block
"""


def measure_alone(code):
    """Return the numbers that a program prints in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC")}
    command = [sys.executable, "-c", LIBRARY + code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return list(map(int, done.stdout.split()))


def test_a_heap_is_trimmed_when_it_has_grown_by_a_quarter(monkeypatch):
    assert memory.read_memory("VmNone") == 0
    sizes, trimmed = [], []
    monkeypatch.setattr(memory, "read_memory", lambda key: sizes[-1])
    monkeypatch.setattr(memory, "trim_memory", lambda: trimmed.append(len(sizes)))
    heap = Heap()
    for size in (100, 90, 120, 125, 126, 200, 249, 251, 100, 120):
        sizes.append(size)
        heap.look()
    assert trimmed == [5, 8], "above 125; then above 250, for 200 was in use when it had been trimmed"


@GLIBC
def test_gaps_in_the_heap_go_back_to_the_system():
    """Many small blocks are freed except the last: the heap stays as it is until it is trimmed."""
    before, after = measure_alone("""
blocks = [allocate(100_000) for _ in range(2000)]
for block in blocks[:-1]:  # the last one keeps the heap from shrinking by itself
    libc.free(block)
print(memory.read_memory("VmRSS"))
memory.trim_memory()
print(memory.read_memory("VmRSS"))
""")
    assert after < before - 50 * 2**20


@GLIBC
def test_blocks_of_an_update_are_kept_for_the_next_one():
    """The first write to a page of a block from the system is a page fault: more than 7,000 if nothing is kept."""
    (faults,) = measure_alone("""
memory.keep_memory()
libc.mallopt(-8, 1)  # one arena, as a thread's own is small
libc.free(allocate(100_000_000))  # the gradient of BERT-base's embeddings
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    libc.free(allocate(100_000_000))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
""")
    assert faults < 1000
