"""What unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import wfbp
from tests.support.local import LocalWorld
from wfbp.config import Config


@pytest.fixture
def alone() -> Iterator[None]:
    """The public functions, on one rank."""
    wfbp.init(backend=LocalWorld(1).backend(0), config=Config())
    yield
    wfbp.shutdown()
