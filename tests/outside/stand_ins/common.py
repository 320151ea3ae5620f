"""What Horovod's ``test_torch.py`` needs of its module of helpers, without Horovod's launcher."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import TestCase

VARIABLES = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def mpi_env_rank_and_size() -> tuple[int, int]:
    """Rank and size by the launcher's variables; of one process without them."""
    for rank, size in VARIABLES:
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def skip_or_fail_gpu_test(test: TestCase, message: str) -> None:
    """There is no GPU."""
    test.skipTest(message)


@contextlib.contextmanager
def temppath() -> Iterator[str]:
    """A path of which nothing exists yet; it is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield str(Path(folder, "content"))
