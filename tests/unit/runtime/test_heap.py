"""What becomes of memory that is freed: gradients' stays, other memory goes when it is told to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MEASURE = """
import ctypes, os, sys

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
"""

FREEING = (
    MEASURE
    + """
from wfbp.runtime.heap import give_back_freed_memory, keep_freed_memory
keep = keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
before = resident()
blocks = [library.malloc(4 << 20) for _ in range(16)]
barrier = library.malloc(1 << 20)  # above them, so that the end of the heap cannot move down
for block in [*blocks, barrier]:
    ctypes.memset(block, 1, 1 << 20)
    if block is not barrier:
        ctypes.memset(block, 1, 4 << 20)
held = resident() - before
for block in blocks:
    library.free(ctypes.c_void_p(block))
kept = resident() - before
gave = give_back_freed_memory()
print(keep, held, kept, gave, resident() - before)
"""
)


def said(program: str, **variables: str) -> list[str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**own, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return run.stdout.split()


@linux
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    keep, held, kept, gave, left = said(FREEING)
    if keep == "False":
        pytest.skip("another C library")
    assert int(held) >= 64
    assert int(kept) >= 60
    assert gave == "True"
    assert int(left) <= 8


@linux
def test_who_sets_malloc_variables_is_left_alone() -> None:
    keep, _, _, gave, _ = said(FREEING, MALLOC_ARENA_MAX="2")
    assert (keep, gave) == ("False", "False")


@linux
def test_zeroed_memory_costs_what_is_touched_of_it_and_goes_when_freed() -> None:
    found = said(
        MEASURE
        + """
from wfbp.comm.arrays import zeroed
before = resident()
data = zeroed(64 << 20)
untouched = resident() - before
assert not data.any()
data[: 32 << 20] = 1
part = data[: 1 << 20]
del data
read = resident() - before
del part
print(untouched, read, resident() - before)
"""
    )
    untouched, touched, left = map(int, found)
    assert untouched <= 1
    assert touched >= 32
    assert left <= 1


@linux
def test_a_forked_process_writes_zeroed_memory_of_its_own() -> None:
    (found,) = said(
        """
import os
from wfbp.comm.arrays import zeroed
data = zeroed(1 << 20)
child = os.fork()
if not child:
    data[:] = 1
    os._exit(0)
os.waitpid(child, 0)
print(data.max())
"""
    )
    assert found == "0"
