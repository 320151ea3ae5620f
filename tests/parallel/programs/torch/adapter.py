"""Every check of what training with the PyTorch adapter does."""

from __future__ import annotations

from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch import (
    arguments,
    batch_norm,
    border,
    checkpoints,
    clipping,
    closures,
    hooks,
    layouts,
    missing,
    optimizers,
    passes,
    precision,
    reading,
    resuming,
    schedules,
    settling,
    touching,
    zeroing,
)

check = Checks(
    zeroing.check,
    passes.check,
    missing.check,
    layouts.check,
    clipping.check,
    precision.check,
    schedules.check,
    checkpoints.check,
    optimizers.check,
    closures.check,
    arguments.check,
    touching.check,
    settling.check,
    reading.check,
    hooks.check,
    border.check,
    resuming.check,
    batch_norm.check,
)
