"""The defects that the tests are tried with can be planted, and the tests are there."""

from __future__ import annotations

import pytest

from tests.mutations.__main__ import ROOT, planted
from tests.mutations.planted import ALL, Mutation


@pytest.mark.parametrize(
    "mutation", [m for part in ALL.values() for m in part], ids=lambda m: m.path
)
def test_a_defect_has_a_place_and_tests(mutation: Mutation) -> None:
    assert planted((ROOT / "wfbp" / mutation.path).read_text(), mutation)
    paths = [word.partition("::")[0] for word in mutation.tests if word.startswith("tests/")]
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
