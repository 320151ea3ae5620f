"""Training that resumes from its last commit after a failed operation, under Horovod's names.

The set of ranks is fixed: a rank that dies ends the job. A function under :func:`run` survives
errors that leave the runtime usable, such as operations that did not match on all ranks.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sized
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from wfbp.errors import InternalError
from wfbp.horovod import refuse
from wfbp.runtime import process
from wfbp.runtime.collectives.api import allgather_object, broadcast_object
from wfbp.torch.state import broadcast_optimizer_state, broadcast_parameters

F = TypeVar("F", bound=Callable[..., Any])


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides a dataset among ranks, and counts which samples of an epoch were processed.

    Args:
        dataset: anything that has a length.
        shuffle: whether the order changes from epoch to epoch.
        seed: of the order, the same on every rank.

    Example:
        >>> import wfbp.horovod.torch as hvd
        >>> hvd.init()
        >>> sampler = hvd.elastic.ElasticSampler(range(4 * hvd.size()), shuffle=False)
        >>> len(sampler)
        4
        >>> sampler.record_batch(batch_idx=0, batch_size=2)
        >>> sampler.processed_num
        2
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch = epoch
        self.processed_num = 0  # by all ranks up to the last merge(), and by this rank since
        self._own = 0  # by this rank since
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count this rank's ``batch_size`` samples as processed; ``batch_idx`` is ignored."""
        self.processed_num += batch_size
        self._own += batch_size

    def state_dict(self) -> dict[str, Any]:
        """The state for :meth:`load_state_dict`."""
        return {"epoch": self.epoch, "processed_num": self.processed_num, "own_num": self._own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a :meth:`state_dict`."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self._own = state_dict.get("own_num", 0)
        self.reset()

    def merge(self) -> None:
        """Count the samples of all ranks, and divide the rest again; collective."""
        by_rank = allgather_object(self.state_dict(), "elastic sampler")
        self.epoch, self.processed_num = by_rank[0]["epoch"], by_rank[0]["processed_num"]
        self.processed_num += sum(state["own_num"] for state in by_rank[1:])
        self._own = 0
        self.reset()

    def reset(self) -> None:
        """Divide the rest of the epoch among the ranks."""
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        left = indices[self.processed_num - self._own :]
        self.num_replicas, self.rank = process.size(), process.rank()
        self.num_samples = math.ceil(len(left) / self.num_replicas)
        # Every rank gets equally many: the first ones are repeated.
        padded = itertools.islice(itertools.cycle(left), self.num_samples * self.num_replicas)
        self._mine = list(padded)[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine)

    def __len__(self) -> int:
        return self.num_samples


_STATEFUL = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)


class TorchState(SimpleNamespace):
    """Values that can be committed, restored, and made equal on all ranks.

    Args:
        model: its parameters and buffers are kept.
        optimizer: its state is kept.
        kwargs: further models, optimizers and samplers, and any objects that can be pickled; each
            becomes an attribute.

    Example:
        >>> import torch, wfbp.horovod.torch as hvd
        >>> hvd.init()
        >>> state = hvd.elastic.TorchState(torch.nn.Linear(1, 1), epoch=1)
        >>> state.epoch = 2
        >>> state.restore()
        >>> state.epoch
        1
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]
    __repr__ = object.__repr__

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        parts = {"model": model, "optimizer": optimizer, **kwargs}
        self._names = [name for name, value in parts.items() if value is not None]
        self._on_reset: list[Callable[[], None]] = []
        self._saved: dict[str, Any] = {}
        for name in self._names:
            setattr(self, name, parts[name])
        self.save()

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Have functions called when training begins again after an error."""
        self._on_reset += callbacks

    def on_reset(self) -> None:
        """Call these functions."""
        for callback in self._on_reset:
            callback()

    def commit(self) -> None:
        """Save."""
        self.save()

    def check_host_updates(self) -> None:
        """Do nothing, because the set of ranks is fixed."""

    def save(self) -> None:
        """Keep all values on this rank."""
        self._saved = {
            name: copy.deepcopy(value.state_dict() if isinstance(value, _STATEFUL) else value)
            for name, value in self._values()
        }

    def restore(self) -> None:
        """Restore the last saved values."""
        for name, value in self._values():
            saved = copy.deepcopy(self._saved[name])
            if isinstance(value, _STATEFUL):
                value.load_state_dict(saved)
            else:
                setattr(self, name, saved)

    def sync(self) -> None:
        """Have rank 0's values on every rank, merge samplers, and save; collective."""
        plain = {}
        for name, value in self._values():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            elif isinstance(value, ElasticSampler):
                value.merge()
            else:
                plain[name] = value
        for name, value in broadcast_object(plain, 0, "elastic state").items():
            setattr(self, name, value)
        self.save()

    def _values(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self._names]


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Lets :func:`run` begin again with the state as it is; raised by programs alone.

    Args:
        skip_sync: whether the ranks' states are equal, so that rank 0's need not be sent.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts have changed")
        self.skip_sync = skip_sync


def run(func: F) -> F:
    """Let a function resume from the last commit if an operation fails on all ranks.

    Args:
        func: takes a :class:`TorchState` first, and resumes from it in each call.

    Returns:
        A function that synchronizes the state, then calls ``func``. It raises an error that has
        ended the runtime, and one that comes again before anything was committed.
    """

    @functools.wraps(func)
    def wrapper(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        failed_at: dict[str, Any] | None = None
        in_sync = False
        while True:
            if not in_sync:
                state.sync()
            in_sync = False
            before = state._saved
            try:
                return func(state, *args, **kwargs)
            except InternalError:
                ended = process.current("elastic.run").thread.error is not None
                if ended or (failed_at is not None and state._saved is before):
                    raise
                failed_at = state._saved
                state.restore()
            except HostsUpdatedInterrupt as interrupt:
                in_sync = interrupt.skip_sync
            state.on_reset()

    return cast(F, wrapper)


if not TYPE_CHECKING:  # which would take every name for one that exists
    __getattr__ = partial(refuse, __name__)
