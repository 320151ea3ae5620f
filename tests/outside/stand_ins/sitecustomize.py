"""``torch.utils.tensorboard`` without TensorBoard: examples log to it."""

import sys
from types import ModuleType
from typing import Any


class SummaryWriter:
    """Writes nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def add_scalar(self, *args: Any, **options: Any) -> None:
        pass


module: Any = ModuleType("torch.utils.tensorboard")
module.SummaryWriter = SummaryWriter
sys.modules["torch.utils.tensorboard"] = module
