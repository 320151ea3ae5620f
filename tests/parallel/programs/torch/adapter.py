"""Every check of what training with the PyTorch adapter does."""

from __future__ import annotations

from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch import (
    arguments,
    around_steps,
    batch_norm,
    changed_gradients,
    clipping,
    hooks,
    layouts,
    passes,
    precision,
    resuming,
    steps,
)

waiting = Checks(
    steps.check,
    arguments.check,
    changed_gradients.check,
    around_steps.check,
    batch_norm.check,
)
"""What is read, and when: checks for plans under which every parameter is waited for."""

mixing = Checks(
    passes.check,
    layouts.check,
    clipping.check,
    precision.check,
    hooks.check,
    resuming.check,
)
"""What gradients and states are: checks for plans under which ranks hold shards of some tensors,
and others whole."""

check = Checks(waiting, mixing)
