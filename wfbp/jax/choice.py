"""Which GPU this rank's programs run on."""

from __future__ import annotations

import jax

from wfbp.cuda.cupy_device import count_devices
from wfbp.cuda.local_device import check_local_rank
from wfbp.runtime import world


def set_local_device() -> jax.Device:
    """Let JAX use this rank's GPU and no other: that of the rank's number on its host.

    To be called after ``init()`` and before JAX computes anything or is asked for its devices: it
    takes memory on every GPU that it is given.

    Returns:
        The device.

    Raises:
        NotInitializedError: before ``wfbp.init()``.
        ImportError: CuPy is not installed, or finds no driver.
        RuntimeError: there are fewer GPUs than ranks on this host; or JAX had set itself up
            before, or is none for CUDA.
    """
    runtime = world.current("set_local_device()")
    mine = runtime.local_rank
    check_local_rank(
        runtime.where, mine, runtime.local_size, count_devices(), "set jax_cuda_visible_devices"
    )
    jax.config.update("jax_cuda_visible_devices", str(mine))
    devices = jax.local_devices()
    if jax.default_backend() == "cpu" or [d.local_hardware_id for d in devices] != [mine]:
        raise RuntimeError(
            f"{runtime.where}: JAX runs on {', '.join(map(str, devices))}, not on GPU {mine} "
            "alone. "
            "Call set_local_device() before JAX computes anything; JAX must be one for CUDA "
            "(pip install 'jax[cuda12]'), and JAX_PLATFORMS not forbid it"
        )
    return devices[0]
