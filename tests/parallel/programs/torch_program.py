"""Every check of the PyTorch adapter: ``torch_program.py OUT MODE [NAME ...]`` under mpirun."""

from __future__ import annotations

from tests.parallel.programs import (
    torch_arguments,
    torch_batch_norm,
    torch_border,
    torch_checkpoints,
    torch_clipping,
    torch_closures,
    torch_hooks,
    torch_layouts,
    torch_missing,
    torch_optimizers,
    torch_passes,
    torch_precision,
    torch_reading,
    torch_resuming,
    torch_schedules,
    torch_settling,
    torch_touching,
    torch_zeroing,
)
from tests.parallel.programs.harness import Checks

check = Checks(
    torch_zeroing.check,
    torch_passes.check,
    torch_missing.check,
    torch_layouts.check,
    torch_clipping.check,
    torch_precision.check,
    torch_schedules.check,
    torch_checkpoints.check,
    torch_optimizers.check,
    torch_closures.check,
    torch_arguments.check,
    torch_touching.check,
    torch_settling.check,
    torch_reading.check,
    torch_hooks.check,
    torch_border.check,
    torch_resuming.check,
    torch_batch_norm.check,
)

if __name__ == "__main__":
    check.main()
