"""A trainer whose gradients and parameters live on a software device."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np

from tests.support.software_device import SoftwareDevice
from tests.support.trainer import address, make_engine
from wfbp.comm.arrays import storage_dtype
from wfbp.comm.device.links import OnDevice
from wfbp.core.types import TensorSpec
from wfbp.runtime.buffers import shard_range
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.step import GradientRef

Array = np.ndarray[Any, Any]


class Pool:
    """Memory that is given out again at once when its last owner lets go, as frameworks do."""

    def __init__(self) -> None:
        self._free: dict[int, list[Array]] = defaultdict(list)

    def take(self, nbytes: int) -> Block:
        free = self._free[nbytes]
        return Block(self._free, free.pop() if free else np.zeros(nbytes, np.uint8))


class Block:
    """Memory from a pool."""

    def __init__(self, free: dict[int, list[Array]], data: Array) -> None:
        self._free = free
        self.data = data

    def __del__(self) -> None:
        self._free[self.data.nbytes].append(self.data)


class DeviceTrainer:
    """Enqueues what a framework would: nothing is known on the host before :meth:`finish`.

    Every element of a tensor has the same value. Backward uses two streams where ``streams`` is 2;
    they wait for the main one before it, and the main one waits for them behind it.
    """

    def __init__(
        self,
        runtime: Runtime,
        device: SoftwareDevice,
        specs: list[TensorSpec],
        *,
        streams: int = 1,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.rank, self.size = runtime.rank, runtime.size
        self.device = device
        self.specs = specs
        self.main = device.new_stream()
        self._streams = [self.main, *(device.new_stream() for _ in range(streams - 1))]
        self._chance = random.Random(seed)
        self._pool = Pool()
        self.grads: list[Any] = [None] * len(specs)
        self.params = [np.zeros(spec.nbytes, np.uint8) for spec in specs]
        self.told: list[tuple[str, Array, float | None]] = []
        with device.on(self.main):
            self.engine = make_engine(
                runtime, specs, location=OnDevice(device), fetch=self._fetch, **options
            )

    def _fetch(self, index: int) -> GradientRef | None:
        grad = self.grads[index]
        return None if grad is None else (address(grad[0]), grad[1])

    def forward(self) -> None:
        for stream in self._streams[1:]:
            self.device.wait(stream, self.device.record(self.main))

    def backward_ends(self) -> None:
        for stream in self._streams[1:]:
            self.device.wait(self.main, self.device.record(stream))

    def accumulate(self, index: int, value: float, announce: bool = True) -> None:
        """As autograd does: into what is there, or anew; then the hook."""
        spec = self.specs[index]
        stream = self._chance.choice(self._streams)
        device, dtype = self.device, storage_dtype(spec.dtype)
        if self.grads[index] is None:
            block = self._pool.take(spec.nbytes)
            data = block.data
            device.write(stream, [data], lambda: data.view(dtype).fill(value))
            self.grads[index] = data, block
        else:
            data, _ = self.grads[index]

            def add(copy: Array) -> None:
                copy.view(dtype)[:] += np.asarray(value, dtype)

            device.update(stream, data, add)
        if announce:
            with device.on(stream):
                self.engine.mark_ready(index, address(data), self.grads[index][1])

    def synchronize(self, wanted: list[float | None], where: str, **options: Any) -> list[Any]:
        """Take what is reduced; it is compared with what is wanted when it has been computed."""
        with self.device.on(self.main):
            slots = self.engine.synchronize(**options)
        for k, (slot, want) in enumerate(zip(slots, wanted, strict=True)):
            assert (slot is None) == (want is None), f"{where}, tensor {k}: {slot}, {want}"
            if slot is None:
                assert self.grads[k] is None
                continue
            if slot.whole:
                self.grads[k] = slot.data, slot.data
            self.note(slot.data, want, f"{where}, gradient {k}", k)
        return slots

    check = synchronize

    def step(self, wanted: list[float | None], where: str, whole: bool) -> None:
        """Reduce and update."""
        self.update(self.synchronize(wanted, where, whole=whole))

    def note(self, data: Array, want: float | None, where: str, index: int) -> None:
        """Compare the data as the main stream finds it, later."""
        seen = np.zeros(data.nbytes, np.uint8)
        self.device.copy(seen, data, self.main)
        self.told.append((where, seen.view(storage_dtype(self.specs[index].dtype)), want))

    def zero(self, to_none: bool = True) -> None:
        with self.device.on(self.main):
            self.engine.discard()
        for k, grad in enumerate(self.grads):
            if to_none:
                self.grads[k] = None
            elif grad is not None:
                data = grad[0]
                self.device.write(self.main, [data], lambda data=data: data.fill(0))

    def update(self, slots: list[Any]) -> None:
        """Subtract whole gradients from parameters, shards from shards, and gather these."""
        engine = self.engine
        for index, slot in enumerate(slots):
            start, stop = shard_range(engine.specs[index], self.rank, self.size)
            if index not in engine.gathers:
                start, stop = 0, self.specs[index].nbytes
            if slot is None:
                continue
            values = slot.data[start:stop] if slot.whole else slot.data
            dtype = storage_dtype(self.specs[index].dtype)

            def subtract(copy: Array, values: Array = values, dtype: Any = dtype) -> None:
                copy.view(dtype)[:] -= values.view(dtype)

            self.device.update(self.main, self.params[index][start:stop], subtract)
        with self.device.on(self.main):
            engine.gathers.send([address(p) for p in self.params], self.params)

    def read(self, index: int, want: float, where: str) -> None:
        """A parameter, as forward reads it."""
        with self.device.on(self.main):
            self.engine.gathers.await_tensor(index)
        self.note(self.params[index], want, f"{where}, parameter {index}", index)

    def finish(self) -> None:
        """Wait for the device, and compare."""
        with self.device.on(self.main):
            self.engine.gathers.flush()
        self.device.drain()
        for where, seen, want in self.told:
            assert (np.abs(seen - want) <= 1e-6 * max(1.0, abs(want or 0.0))).all(), (
                f"{where}: {seen[:4]} instead of {want}"
            )
        self.told.clear()
