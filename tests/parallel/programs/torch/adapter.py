"""Every check of what training with the PyTorch adapter does."""

from __future__ import annotations

from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch import (
    arguments,
    around_steps,
    batch_norm,
    changed_gradients,
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
    skipped_steps,
    zeroing,
)

waiting = Checks(
    zeroing.check,
    optimizers.check,
    closures.check,
    arguments.check,
    changed_gradients.check,
    skipped_steps.check,
    reading.check,
    around_steps.check,
    batch_norm.check,
)
"""What is read, and when: checks for plans under which every parameter is waited for."""

mixing = Checks(
    passes.check,
    missing.check,
    layouts.check,
    clipping.check,
    precision.check,
    checkpoints.check,
    hooks.check,
    resuming.check,
)
"""What gradients and states are: checks for plans under which ranks hold shards of some tensors,
and others whole."""

check = Checks(waiting, mixing)
