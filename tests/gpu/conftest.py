"""What tests on a GPU share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def cupy() -> Any:
    """CuPy, where it finds a device."""
    module = pytest.importorskip("cupy")
    if not module.cuda.is_available():
        pytest.skip("no CUDA device was found")
    return module
