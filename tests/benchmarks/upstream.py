"""PyTorch's own tests of its process groups, under gloo and under wfbp.

    python -m tests.benchmarks upstream [--ranks 3] [--only NAME ...] [--json FILE]

Runs ``torch/testing/_internal/distributed/distributed_test.py``, which PyTorch's wheels contain, on
CPU tensors. Tests that are for gloo alone run under wfbp too. A test that fails or hangs ends its
job, and the next one starts another. Needs ``expecttest``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HANGS_S = 90.0
"""A job without a result for so long is ended."""


def main(argv: Sequence[str]) -> int:
    """Run the tests under both backends; fail if wfbp fails one that gloo passes."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks upstream", description=__doc__
    )
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], help="names of tests")
    parser.add_argument("--backends", nargs="+", default=["gloo", "wfbp"])
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args(argv)
    results = {
        backend: _run(backend, arguments.ranks, arguments.only) for backend in arguments.backends
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))
    for backend, found in results.items():
        kinds = [text.partition(":")[0] for text in found.values()]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        print(f"{backend}: {counts}")
    expected = [n for n, text in results.get("gloo", {}).items() if text == "passed"]
    missed = {n: results["wfbp"].get(n, "") for n in expected if "wfbp" in results}
    missed = {n: text for n, text in missed.items() if text != "passed"}
    print(f"of {len(expected)} tests that gloo passes, wfbp passes {len(expected) - len(missed)}")
    for name, text in missed.items():
        print(f"{name}\n    {text}")
    return 1 if missed else 0


def _run(backend: str, ranks: int, only: Sequence[str]) -> dict[str, str]:
    """The outcome of each test: passed, skipped, failed or hung, with the reason."""
    results: dict[str, str] = {}
    environment = {
        **os.environ,
        "BACKEND": "gloo",  # decides which tests there are
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    mpirun = Path(sys.executable).with_name("mpirun")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("barrier", "test_dir", "init_dir"):
            Path(folder, name).mkdir()
        environment["TEMP_DIR"] = folder
        progress = Path(folder, "progress")
        while True:
            progress.touch()
            command = [mpirun, "-n", ranks, sys.executable, "-m", "tests.benchmarks.upstream"]
            known = Path(folder, "known.json")
            known.write_text(json.dumps([list(results), list(only)]))
            job = subprocess.Popen(
                [*map(str, command), backend, folder], env=environment, stderr=subprocess.DEVNULL
            )
            hung = _watch(job, progress)
            lines = [json.loads(line) for line in progress.read_text().splitlines()]
            progress.unlink()
            for name, text in (line for line in lines if line[1]):
                results[name] = text if results.get(name, "passed") == "passed" else results[name]
            begun = [name for name, text in lines if not text]
            if not begun:
                return results
            if begun[-1] not in results or hung:
                results[begun[-1]] = "hung" if hung else "ended its job"
            print(f"{backend}: {len(results)} done", file=sys.stderr, flush=True)


def _watch(job: subprocess.Popen[bytes], progress: Path) -> bool:
    """Wait for a job; True if it had to be ended because it made no progress."""
    while job.poll() is None:
        time.sleep(0.2)
        if time.time() - progress.stat().st_mtime > HANGS_S:
            job.kill()
            job.wait()
            return True
    return False


class _Backend(str):
    """Its name, but also equal to gloo's: tests choose what they do on CPU tensors by that."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str(self) == other


def _rank(backend: str, folder: str) -> None:
    """One rank of a job: runs tests until one fails."""
    import unittest
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from mpi4py import MPI
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed
    from torch.testing._internal.distributed import distributed_test

    from wfbp.torch.distributed import register

    register()
    torch.set_num_threads(1)
    distributed_test.BACKEND = _Backend(backend)
    world = MPI.COMM_WORLD
    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}

    class Tests(  # type: ignore[misc]
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        pass

    done, only = json.loads(Path(folder, "known.json").read_text())
    names = [n for n in unittest.TestLoader().getTestCaseNames(Tests) if n not in done]
    for name in (n for n in names if not only or n in only):
        if world.rank == 0:
            _note(folder, name, "")
        distributed_test.Barrier.barrier_id = 0
        world.Barrier()  # a rank may still look at the files of the last test
        if world.rank == 0:
            for file in Path(folder, "barrier").iterdir():
                file.unlink()
        world.Barrier()
        test = Tests(name)
        test.rank, test.file_name = world.rank, f"{folder}/{backend}-{name}"
        text = "passed"
        set_rng_seed(1234)
        try:
            seconds = distributed_test.CUSTOM_PG_TIMEOUT.get(
                name, distributed_test.default_pg_timeout
            )
            dist.init_process_group(
                backend,
                init_method=f"file://{test.file_name}",
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=seconds),
            )
            test._barrier()
            getattr(test, name)()
            test._barrier()
            dist.destroy_process_group()
        except SystemExit as end:
            if end.code:
                text = f"skipped: {skips.get(end.code, end.code)}"
        except unittest.SkipTest as skip:
            text = f"skipped: {skip}"
        except BaseException as error:
            text = f"failed: rank {world.rank}: {type(error).__name__}: {error}"[:2000]
        if text.startswith("skipped") and dist.is_initialized():
            dist.destroy_process_group()
        if text.startswith("failed"):
            _note(folder, name, text)
            world.Abort(1)
        texts = world.allgather(text)  # only here may rank 0 begin the next one
        if world.rank == 0:
            _note(folder, name, texts[0])


def _note(folder: str, name: str, text: str) -> None:
    """Tell that a test begins (no text), or what became of it."""
    with open(Path(folder, "progress"), "a") as file:
        file.write(json.dumps([name, text]) + "\n")


if __name__ == "__main__":
    _rank(*sys.argv[1:])
