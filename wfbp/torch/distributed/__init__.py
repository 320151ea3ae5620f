"""The backend ``wfbp`` of ``torch.distributed``, for CPU tensors. Importing it registers it.

Under ``mpirun``, ``wfbprun`` or ``srun`` no address, port or rank is needed. In reading order:
``groups`` (how ranks meet), ``process_group`` (what PyTorch calls), ``work`` (what callers wait
for), its subclasses in ``group_collectives`` and ``group_messages`` (what ranks exchange),
``group_lane`` (the communication thread's side), and ``comm_hook`` (fewer bits, for DDP).

Example:
    >>> import torch, torch.distributed as dist
    >>> import wfbp.torch.distributed
    >>> dist.init_process_group("wfbp", init_method="wfbp://")
    >>> total = torch.ones(3)
    >>> dist.all_reduce(total)
    >>> dist.destroy_process_group()
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import _rendezvous_handlers as rendezvous_handlers

from wfbp.runtime import launched
from wfbp.torch.distributed import groups
from wfbp.torch.distributed.comm_hook import comm_hook
from wfbp.torch.distributed.process_group import ProcessGroup

__all__ = ["ProcessGroup", "comm_hook", "register"]


@functools.cache
def register() -> None:
    """Register the backend, unless PyTorch has done so (``integrations/torch_backend``)."""
    launched.prepare()
    if "WFBP" not in dist.Backend._plugins:
        dist.Backend.register_backend("wfbp", groups.create, extended_api=True, devices=["cpu"])
    rendezvous_handlers["wfbp"] = groups.over_mpi
    rendezvous_handlers["env"] = groups.by_environment
    # PyTorch offers these two for a fixed list of backends.
    _extend("monitored_barrier", "group", ProcessGroup.monitored_barrier)
    _extend("split_group", "parent_pg", ProcessGroup.split)
    _end_coalescing_after_errors()


def _extend(name: str, key: str, own: Callable[..., Any]) -> None:
    """Let a function of PyTorch, whose first argument is ``key``, serve this backend, too."""
    of_torch = getattr(distributed_c10d, name)

    @functools.wraps(of_torch)
    def function(group: Any = None, *args: Any, **options: Any) -> Any:
        group = options.pop(key, group)
        called = group or distributed_c10d.GroupMember.WORLD
        if isinstance(called, ProcessGroup):
            return own(called, *args, **options)
        return of_torch(group, *args, **options)

    setattr(distributed_c10d, name, function)
    setattr(dist, name, function)


def _end_coalescing_after_errors() -> None:
    """After an exception in ``_coalescing_manager`` PyTorch would go on to collect operations, and
    never begin them."""
    name = "_coalescing_manager"
    of_torch = getattr(distributed_c10d, name)

    @functools.wraps(of_torch)
    @contextmanager
    def manager(group: Any = None, *args: Any, **options: Any) -> Iterator[Any]:
        group = group or distributed_c10d._get_default_group()
        with of_torch(group, *args, **options) as collected:
            try:
                yield collected
            except BaseException:
                if isinstance(group, ProcessGroup):
                    distributed_c10d._world.pg_coalesce_state.pop(group, None)
                    group.abandon_coalescing()
                raise

    for module in (distributed_c10d, dist):
        setattr(module, name, manager)


register()
