"""What type checkers are told of PyTorch's side is there when the program runs.

``make type`` checks ``tests/typing``, where each wrong use is marked as an error.
"""

from __future__ import annotations

import inspect

import pytest

from tests.typing import torch_program
from wfbp.horovod.torch.adasum import AdasumOptimizerBase
from wfbp.torch.optimizer import AveragingOptimizerBase
from wfbp.torch.optimizer_interface import DistributedOptimizerBase


def test_the_program_that_is_type_checked_runs() -> None:
    torch_program.main()


@pytest.mark.parametrize("kind", [AveragingOptimizerBase, AdasumOptimizerBase])
def test_distributed_optimizers_have_every_method_of_the_interface(kind: type) -> None:
    for name, method in inspect.getmembers(DistributedOptimizerBase, inspect.isfunction):
        if name in vars(DistributedOptimizerBase) and not name.startswith("_"):
            own = getattr(kind, name)
            assert own is not method
            assert inspect.getdoc(own), f"{name} is documented where it is defined, or inherited"
