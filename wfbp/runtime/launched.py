"""For programs that read torchrun's variables: sets them on ranks that another launcher started.

PyTorch calls :func:`prepare` when it is imported (``integrations/torch_backend``), before a program
reads the variables. ``wfbprun`` sets them by itself (``launcher/rank``).
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from wfbp.comm.mpi.start import started_by_launcher, started_by_rank
from wfbp.config import read_environment
from wfbp.launcher.rank import TORCH_VARIABLES, torch_variables, under_launcher

T = TypeVar("T")

rendezvous_used = False
"""Whether torch.distributed has looked for other ranks, so that this one is not alone."""


@functools.cache
def prepare() -> None:
    """Set the variables of this rank, and warn at its end if nothing has connected the ranks."""
    if not under_launcher() or not started_by_launcher(os.environ) or started_by_rank():
        return
    config, _ = read_environment()
    if not config.torch_env and "WFBPRUN" not in os.environ:
        return  # ranks that are to run alone
    if config.torch_env and not any(name in os.environ for name in TORCH_VARIABLES):
        os.environ |= torch_variables(os.environ)
    if torch_variables(os.environ).get("RANK") == "0":
        atexit.register(_warn_if_alone, torch_variables(os.environ)["WORLD_SIZE"])


def noted(handler: Callable[..., T]) -> Callable[..., T]:
    """A rendezvous handler of PyTorch that notes its use."""

    def find(*arguments: Any, **options: Any) -> T:
        global rendezvous_used
        rendezvous_used = True
        return handler(*arguments, **options)

    return find


def _warn_if_alone(size: str) -> None:
    """Tell that nothing has connected the ranks; not if the program failed, or uses MPI itself."""
    torch = sys.modules.get("torch.distributed")
    is_connected = torch is not None and torch.is_available() and torch.is_initialized()
    if is_connected or rendezvous_used or "mpi4py.MPI" in sys.modules or "horovod" in sys.modules:
        return
    if getattr(sys, "last_value", None) is not None:
        return
    sys.stderr.write(
        f"wfbp: WARNING: this program was started on {size} ranks, and ended without wfbp.init() "
        "or torch.distributed.init_process_group(): each rank ran all of it alone, and rank 0 "
        "may have overwritten the others' files. Call one of them first, or start one rank\n"
    )
