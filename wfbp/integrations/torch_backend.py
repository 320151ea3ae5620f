"""PyTorch calls :func:`register` when it is imported (entry point ``torch.backends``).

:mod:`wfbp.torch.distributed` is loaded only when a program uses the backend, so that others pay
nothing for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from wfbp.launcher.rank import meets_by_mpi
from wfbp.runtime import launched


def register() -> None:
    """Announce the backend ``wfbp`` to ``torch.distributed``."""
    import torch.distributed as dist

    launched.prepare()
    if not dist.is_available():
        return
    from torch.distributed.rendezvous import _env_rendezvous_handler, _rendezvous_handlers

    if "WFBP" in dist.Backend._plugins:
        return
    dist.Backend.register_backend(
        "wfbp",
        lambda *options: import_module("wfbp.torch.distributed.groups").create(*options),
        extended_api=True,
        devices=["cpu"],
    )

    def by_environment(url: str, **options: Any) -> Any:
        launched.rendezvous_used = True
        if not meets_by_mpi(url):
            return _env_rendezvous_handler(url, **options)
        import_module("wfbp.torch.distributed")  # which puts its own handler here
        return _rendezvous_handlers["env"](url, **options)

    for scheme in ("tcp", "file"):
        if scheme in _rendezvous_handlers:
            _rendezvous_handlers[scheme] = launched.noted(_rendezvous_handlers[scheme])
    if "wfbp" not in _rendezvous_handlers:
        _rendezvous_handlers["env"] = by_environment
