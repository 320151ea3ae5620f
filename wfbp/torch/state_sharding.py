"""Shards of parameters and of optimizer state, and the way between them and whole tensors.

Ranks join shards in two ways. They do it together if all of them need whole state at the same place
of the program, as when a plan changes. One rank that wants whole state alone, as for a checkpoint,
fetches shards from the others' communication threads.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from collections import UserDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from wfbp.core.types import TensorSpec
from wfbp.errors import DisagreementError
from wfbp.runtime.buffers import shard_range
from wfbp.runtime.progress.channel import ControlChannel
from wfbp.runtime.progress.fetching import Fetched
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.step import BufferView
from wfbp.torch import tensors

State = dict[Any, dict[Any, Any]]

_LABEL = "gathering optimizer state"
_FETCH_LABEL = "optimizer.state_dict(): fetching the other ranks' shards of the state"
_FETCH_BYTES = 128 << 20

_MARK = torch.empty(0)
"""A key of the state where other ranks alone have state of shards."""


class SharedOutState(UserDict[Any, Any]):
    """An optimizer's state while ranks hold shards of it, for the program. To look for the state of
    a sharded parameter is an error: this rank does not have it, and would not use what is put
    there."""

    def __init__(self, sharding: StateSharding, state: State) -> None:
        self._sharding = sharding
        self.data = state  # itself

    def _check(self, key: object) -> None:
        if name := self._sharding.name_of(key):
            raise RuntimeError(
                f"optimizer.state of {name} is in shards on all ranks, because the plan decouples "
                "it. Read optimizer.state_dict(), also to change the state: load it on every rank. "
                "Or pass optimizer_sharding=False or schedule='oasr' to DistributedOptimizer"
            )

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return key in self.data

    def __getitem__(self, key: Any) -> Any:
        self._check(key)
        return self.data[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        self.data[key] = value

    def __delitem__(self, key: Any) -> None:
        self._check(key)
        del self.data[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        return copy.deepcopy(self.data, memo)


class StateSharding:
    """The parameters of an optimizer that are updated shard by shard at present, and their state.

    A sharded parameter's shard is a flat tensor that shares its memory, and replaces it in the
    optimizer's state. State of the parameter's own shape is sharded with it; other values
    (counts of steps) are the same on every rank.

    ``params`` are dense in memory. The state of ``optimizer``, by parameter or shard, is changed in
    place. ``channel`` is this optimizer's own, because another thread may use another optimizer.
    """

    def __init__(
        self,
        runtime: Runtime,
        specs: Sequence[TensorSpec],
        params: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        channel: ControlChannel,
    ) -> None:
        self._runtime = runtime
        self._channel = channel
        self._params = params
        self._optimizer = optimizer
        self._names = [spec.name for spec in specs]
        self._numbers = {id(p): k for k, p in enumerate(params)}
        self._layouts = [tensors.Layout.of(p) for p in params]
        self._counts = [_counts(spec, runtime.size) for spec in specs]
        rank = runtime.rank
        self._parts = [slice(sum(c[:rank]), sum(c[: rank + 1])) for c in self._counts]
        self.shards: dict[int, torch.Tensor] = {}
        """Those of the sharded parameters, by index; see :meth:`shard`."""
        self._version = 0
        self._entries: State = {}
        self._is_changing = False
        self._store = runtime.open_store()
        weakref.finalize(self, runtime.drop_store, self._store).atexit = False

    def __len__(self) -> int:
        return len(self.shards)

    def name_of(self, key: object) -> str:
        """The name of a parameter that is sharded now; empty for any other key."""
        index = self._numbers.get(id(key))
        return self._names[index] if index in self.shards else ""

    def shard(
        self, index: int, reduced: BufferView | None, grad: torch.Tensor | None
    ) -> torch.Tensor:
        """A sharded parameter's shard in the parameter's present memory, with its gradient: the
        reduced one, or its part of a whole one."""
        shard, param, part = self.shards[index], self._params[index], self._parts[index]
        if shard.data_ptr() != param.data_ptr() + part.start * param.element_size():
            self._place(shard, index)  # the parameter's data was replaced
        # An empty shard has no gradient. It is stepped, because an optimizer may count steps.
        if shard.numel() and reduced is not None and not reduced.whole:
            layout = tensors.Layout(param.dtype, shard.shape, shard.stride())
            shard.grad = tensors.lent(reduced, layout).alias()
        elif shard.numel() and grad is not None:
            whole = tensors.flat(_ordered(param, grad))
            shard.grad = whole[part].view(shard.shape)
        return shard

    def _place(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """Let a tensor be a parameter's shard."""
        # No view: that would keep another tensor that uses the parameter's memory.
        param, part = self._params[index], self._parts[index]
        count = part.stop - part.start
        # State of shape (1,), such as a step count, must not match a shard of one element.
        shape = (count,) if count != 1 else (1, 1) if param.dim() else ()
        with torch.no_grad():
            return shard.set_(  # type: ignore[call-overload, no-any-return]
                param.untyped_storage(),
                param.storage_offset() + part.start,
                shape,
            )

    def check(self) -> None:
        """Raise ``RuntimeError`` if a sharded parameter has another form than before."""
        for index in self.shards:
            param, layout = self._params[index], self._layouts[index]
            if param.shape != layout.shape or param.dtype is not layout.dtype:
                layout.check(param, param, self._names[index])
            if param.stride() != layout.stride:
                raise RuntimeError(
                    f"{self._names[index]} had strides {layout.stride} when the optimizer was "
                    f"wrapped and has {param.stride()} now; convert a model to another memory "
                    "format before DistributedOptimizer, or choose a schedule of all-reduces"
                )

    def follow(self, sharded: Sequence[int]) -> None:
        """Shard these parameters and no others; a collective, with the same ones on every rank."""
        self.let_go()
        target = set(sharded)
        self._join(sorted(self.shards.keys() - target))
        for index in sorted(target - self.shards.keys()):
            self._split(index)

    def forget(self) -> None:
        """The state is whole again, because another one was loaded."""
        self.let_go()
        self.shards.clear()

    def let_go(self) -> None:
        """Leave the optimizer no state that is not its own."""
        self._optimizer.state.pop(_MARK, None)
        self._entries.pop(_MARK, None)

    def begin_update(self) -> None:
        """The optimizer is about to change the state."""
        self.let_go()
        self._store.published = None
        self._is_changing = True

    def publish(self) -> None:
        """An update is complete: until the next one other ranks may fetch what it made."""
        if not self._is_changing:
            return
        self._is_changing = False
        self._version += 1
        if self.shards and not self.lies_in(self._optimizer.state):
            # So that this rank, too, can tell whether the program empties the state. (Programs drop
            # entries that are empty.)
            self._optimizer.state[_MARK] = {"on_other_ranks": True}
        # Shallow copies: the program may empty the state before another rank has asked.
        self._entries = entries = dict(self._optimizer.state) if self.shards else {}
        shards = dict(self.shards)
        self._store.published = self._version, lambda items: _collect(items, shards, entries)

    def whole_state(self) -> State:
        """The state as it would be without shards, by parameter; any rank may ask, alone."""
        if self._is_changing:
            raise RuntimeError(
                f"{self._runtime.where}: optimizer.state_dict() within step(): other ranks may be "
                "changing their parts of the state; call it after step(), or in a post-hook"
            )
        keys = {_MARK, *self.shards.values()}
        state = {key: value for key, value in self._optimizer.state.items() if key not in keys}
        # The program may have emptied the state since the last update, as on all ranks.
        was_emptied = self.lies_in(self._entries) and not self.lies_in(self._optimizer.state)
        fetched = {} if was_emptied else self._fetch(sorted(self.shards))
        # In the parameters' order, as every optimizer fills its state.
        for index, param in enumerate(self._params):
            if entry := fetched.get(index):
                state[param] = entry
        return state

    def lies_in(self, state: State) -> bool:
        """Whether there is state of any shard among this, or what stands for it."""
        return not state.keys().isdisjoint([*self.shards.values(), _MARK])

    def _fetch(self, indices: Sequence[int]) -> dict[int, dict[Any, Any]]:
        """The whole state of sharded parameters, in new tensors; not a collective."""
        entries: dict[int, dict[Any, Any]] = {}
        for batch in self._batches(indices):
            fetched = self._runtime.fetch(self._store, self._version, batch, _FETCH_LABEL)
            fetched[self._runtime.rank] = _collect(batch, self.shards, self._optimizer.state)
            entries |= self._put_together(batch, fetched)
        return entries

    def _batches(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Parameters whose state is brought at a time: what arrives is memory beside them."""
        batch: list[int] = []
        for index in indices:
            batch.append(index)
            if sum(self._params[k].nbytes for k in batch) >= _FETCH_BYTES or index == indices[-1]:
                yield batch
                batch = []

    def _put_together(self, indices: Sequence[int], fetched: Fetched) -> dict[int, dict[Any, Any]]:
        """Whole tensors, from every rank's part of them."""
        outlines: dict[int, dict[Any, Any]] = {}
        whole: dict[int, dict[Any, Any]] = {}
        # The first rank has a part of every parameter that has elements at all.
        for rank in sorted(fetched):
            head, parts = pickle.loads(fetched[rank])
            arriving = iter(parts)
            for index in indices:
                if not self._counts[index][rank]:
                    continue
                outline, param = head[index], self._params[index]
                kinds = {k: v for k, v in outline.items() if isinstance(v, torch.dtype)}
                if index not in whole:
                    outlines[index] = kinds
                    whole[index] = {
                        key: torch.empty_like(param, dtype=value, requires_grad=False)
                        if key in kinds
                        else value
                        for key, value in outline.items()
                    }
                if kinds != outlines[index]:
                    raise DisagreementError(
                        f"{self._runtime.where}: optimizer.state_dict(): the state of "
                        f"{self._names[index]} has {_shown(kinds)} on rank {rank} and "
                        f"{_shown(outlines[index])} on a rank before; every rank must change the "
                        "optimizer's state alike"
                    )
                start = sum(self._counts[index][:rank])
                for key, dtype in kinds.items():
                    part = tensors.shared(next(arriving)).view(dtype)
                    tensors.flat(whole[index][key])[start : start + len(part)].copy_(part)
        return whole

    def _split(self, index: int) -> None:
        param = self._params[index]
        shard = self._place(torch.empty(0, dtype=param.dtype, device=param.device), index)
        self.shards[index] = shard
        entry = self._optimizer.state.pop(param, None)
        if not entry or not shard.numel():
            return
        self._optimizer.state[shard] = {
            key: tensors.flat(_ordered(param, value))[self._parts[index]].clone().view(shard.shape)
            if _goes_with(param, value)
            else value
            for key, value in entry.items()
        }

    def _join(self, indices: Sequence[int]) -> None:
        """Have the whole state of sharded parameters; collective."""
        for batch in self._batches(indices):
            mine = _collect(batch, self.shards, self._optimizer.state)
            payloads = self._channel.exchange(mine, _LABEL)
            whole = self._put_together(batch, dict(enumerate(payloads)))
            for index in batch:
                self._optimizer.state.pop(self.shards.pop(index), None)
                if entry := whole.get(index):
                    self._optimizer.state[self._params[index]] = entry


def _collect(
    indices: Sequence[int],
    shards: dict[int, torch.Tensor],
    state: State,
) -> bytes:
    """Outlines and bytes of shards' state, pickled, because a value may be any object of the
    optimizer's; ``DisagreementError`` if one is not sharded here."""
    outlines: dict[int, dict[Any, Any]] = {}
    parts: list[Any] = []
    for index in indices:
        shard = shards.get(index)
        if shard is None:
            raise DisagreementError("has another part of the optimizer's state in shards")
        if not shard.numel():
            continue
        outlines[index] = outline = {}
        for key, value in state.get(shard, {}).items():
            outline[key] = value
            if _goes_with(shard, value):
                if value.is_cuda:
                    torch.cuda.synchronize(value.device)  # its update runs on another stream
                outline[key] = value.dtype
                parts.append(tensors.raw(tensors.on_host(value)))
    return pickle.dumps((outlines, parts), pickle.HIGHEST_PROTOCOL)


def _shown(kinds: dict[Any, torch.dtype]) -> str:
    return ", ".join(f"{key} ({dtype})" for key, dtype in kinds.items()) or "no tensors"


def _counts(spec: TensorSpec, size: int) -> list[int]:
    """Elements of each rank's shard."""
    width = spec.nbytes // spec.numel if spec.numel else 1
    ranges = [shard_range(spec, rank, size) for rank in range(size)]
    return [(stop - start) // width for start, stop in ranges]


def _goes_with(tensor: torch.Tensor, value: Any) -> bool:
    """Whether a value in a tensor's state has an element for each of its elements."""
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


def _ordered(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value of a parameter's shape in the memory order of the parameter."""
    if value.stride() == param.stride():
        return value
    return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)
