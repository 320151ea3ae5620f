"""What type checkers are told of PyTorch's side is there when the program runs.

``make type`` checks ``tests/typing``, where each wrong use is marked as an error.
"""

from __future__ import annotations

from tests.typing import torch_program


def test_the_program_that_is_type_checked_runs() -> None:
    torch_program.main()
