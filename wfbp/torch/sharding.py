"""Shards of parameters and of optimizer state, and the way between them and whole tensors."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from wfbp.core.types import TensorSpec
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.shards import shard_range
from wfbp.torch import tensors

State = dict[Any, dict[Any, Any]]

_LABEL = "gathering optimizer state, as for optimizer.state_dict(), which every rank must call"
"""Most often one rank waits here alone because it alone saves."""


class Sharding:
    """Which parameters of an optimizer are updated shard by shard at present, and their state.

    A sharded parameter's shard is a tensor of one dimension that shares its memory, and stands for
    it in the optimizer's state. Whatever lies in the state with the parameter's own shape is
    sharded with it; other values (counts of steps) are the same on every rank.

    Args:
        runtime: with more than one rank.
        specs: of the parameters, in the same order.
        params: dense in memory.
        optimizer: whose state, by parameter or shard, is changed in place.
    """

    def __init__(
        self,
        runtime: Runtime,
        specs: Sequence[TensorSpec],
        params: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._runtime = runtime
        self._params = params
        self._optimizer = optimizer
        self._names = [spec.name for spec in specs]
        self._layouts = [tensors.Layout.of(p) for p in params]
        self._counts = [_counts(spec, runtime.size) for spec in specs]
        rank = runtime.rank
        self._parts = [slice(sum(c[:rank]), sum(c[: rank + 1])) for c in self._counts]
        self._shards: dict[int, torch.Tensor] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._shards

    @property
    def _state(self) -> State:
        """Looked up each time: a program may give its optimizer another one."""
        return self._optimizer.state

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def indices(self) -> list[int]:
        """Of the sharded parameters."""
        return list(self._shards)

    def shard(self, index: int) -> torch.Tensor:
        """The shard that stands for a sharded parameter, where its memory lies now."""
        shard = self._shards[index]
        place = self.part(index, flat(self._params[index].detach()))
        if shard.data_ptr() != place.data_ptr():  # the parameter's data was replaced
            shard.data = place
        return shard

    def drop_gradients(self) -> None:
        """Leave no gradients with the shards."""
        for shard in self._shards.values():
            shard.grad = None

    def check(self) -> None:
        """Raise unless sharded parameters lie in memory as they did, so that shards fit together.

        Raises:
            RuntimeError: a parameter has another shape, element type or memory order.
        """
        for index in self._shards:
            param, layout = self._params[index], self._layouts[index]
            if param.shape != layout.shape or param.dtype is not layout.dtype:
                layout.check(param, param, self._names[index])
            if param.stride() != layout.stride:
                raise RuntimeError(
                    f"{self._names[index]} had strides {layout.stride} when the optimizer was "
                    f"wrapped and has {param.stride()} now; convert a model to another memory "
                    "format before DistributedOptimizer, or choose a schedule of all-reduces"
                )

    def part(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor with the parameter's number of elements."""
        return whole[self._parts[index]]

    def follow(self, sharded: Sequence[int]) -> None:
        """Shard these parameters and no others; a collective, with the same ones on every rank."""
        target = set(sharded)
        self._join(sorted(self._shards.keys() - target))
        for index in sorted(target - self._shards.keys()):
            self._split(index)

    def forget(self) -> None:
        """The state is whole again, because another one was loaded."""
        self._shards.clear()

    def whole_state(self) -> State:
        """The state as it would be without shards, by parameter; a collective."""
        found = {key: value for key, value in self._state.items() if key not in self._keys()}
        gathered = self._gather(sorted(self._shards))
        # In the parameters' order, as every optimizer fills its state.
        for index, param in enumerate(self._params):
            if entry := gathered.get(index):
                found[param] = entry
        return found

    def _keys(self) -> set[torch.Tensor]:
        return set(self._shards.values())

    def _split(self, index: int) -> None:
        param = self._params[index]
        shard = self.part(index, flat(param.detach()))
        self._shards[index] = shard
        entry = self._state.pop(param, None)
        if not entry or not shard.numel():
            return
        self._state[shard] = {
            key: self.part(index, flat(ordered(param, value))).clone()
            if _goes_with(param, value)
            else value
            for key, value in entry.items()
        }

    def _join(self, indices: Sequence[int]) -> None:
        gathered = self._gather(indices)
        for index in indices:
            self._state.pop(self._shards.pop(index), None)
            if entry := gathered.get(index):
                self._state[self._params[index]] = entry

    def _gather(self, indices: Sequence[int]) -> dict[int, dict[Any, Any]]:
        """The whole state of sharded parameters, in new tensors."""
        if not indices:
            return {}
        # The first rank has a part of every parameter that has elements at all.
        mine = {index: self._outline(index) for index in indices}
        said = self._runtime.exchange(pickle.dumps(mine), _LABEL)
        outline: dict[int, dict[Any, Any]] = pickle.loads(said[0])
        return {
            index: {
                key: self._gather_one(index, key, value)
                if isinstance(value, torch.dtype)
                else value
                for key, value in outline[index].items()
            }
            for index in indices
        }

    def _outline(self, index: int) -> dict[Any, Any]:
        """A shard's state, its sharded tensors replaced by their element types."""
        if self._runtime.rank:
            return {}
        shard = self._shards[index]
        return {
            key: value.dtype if _goes_with(shard, value) else value
            for key, value in self._state.get(shard, {}).items()
        }

    def _gather_one(self, index: int, key: Any, dtype: torch.dtype) -> torch.Tensor:
        param = self._params[index]
        whole = torch.empty_like(param, dtype=dtype, requires_grad=False)
        line = flat(whole)
        shard = self._shards[index]
        if shard.numel():
            self.part(index, line).copy_(self._state[shard][key])
        counts = [count * dtype.itemsize for count in self._counts[index]]
        host = tensors.on_host(line)
        data = tensors.raw(host)
        self._runtime.call(lambda backend: backend.all_gather(data, counts), _LABEL)
        if host.data_ptr() != line.data_ptr():
            line.copy_(host)
        return whole


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of their memory, shared."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def _counts(spec: TensorSpec, size: int) -> list[int]:
    """Elements of each rank's shard."""
    width = spec.nbytes // spec.numel if spec.numel else 1
    ranges = [shard_range(spec, rank, size) for rank in range(size)]
    return [(stop - start) // width for start, stop in ranges]


def _goes_with(tensor: torch.Tensor, value: Any) -> bool:
    """Whether a value in a tensor's state has an element for each of its elements."""
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


def ordered(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value of a parameter's shape in the memory order of the parameter."""
    if value.stride() == param.stride():
        return value
    return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)
