"""The contract on an emulated link, as far as it goes there: all ranks bring the same.

A check that lets ranks bring different values has no meaning where one process plays them all;
the others, and every check with one rank, hold.
"""

from __future__ import annotations

import pytest

from tests.contract.checks import CHECKS
from tests.support.emulated_link import EmulatedLink

EQUAL_RANKS = (
    "a_late_rank",
    "all_gather_rejects",
    "bad_buffers",
    "half_overflow",
    "infinity",
    "reduce_scatter_rejects",
)


MISSING = ("all_to_all", "subset")
"""What an emulated link does not offer."""


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in MISSING])
def test_contract_of_one_rank(name: str) -> None:
    CHECKS[name](EmulatedLink(lambda nbytes: 1e-6, size=1))


@pytest.mark.parametrize("name", EQUAL_RANKS)
@pytest.mark.parametrize("size", [2, 3])
def test_contract_of_equal_ranks(name: str, size: int) -> None:
    CHECKS[name](EmulatedLink(lambda nbytes: 1e-6, size=size))
