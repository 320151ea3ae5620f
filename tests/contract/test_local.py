"""The contract on ranks as threads."""

from __future__ import annotations

import threading

import pytest

from tests.contract.checks import CHECKS, LARGEST
from tests.support.local import LocalWorld


@pytest.mark.parametrize(
    ("name", "size"),
    # Threads hand arrays over: that they are large matters to no number of them.
    [(name, size) for name in CHECKS for size in ((3,) if name in LARGEST else (1, 3))],
)
def test_contract(name: str, size: int) -> None:
    world = LocalWorld(size)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            CHECKS[name](world.backend(rank))
        except BaseException as error:
            errors.append(error)
            world.backend(rank).abort(1)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
