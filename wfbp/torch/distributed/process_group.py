"""The process group of ``torch.distributed``: its methods, as PyTorch calls them.

Every collective becomes an ``Operation`` of the group's lane: what ranks compare, how it starts,
and what is left to do when it is complete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import BackendConfig, _world

from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Finished, Work
from wfbp.comm.mpi.exchange import Blocks, Exchange
from wfbp.errors import PeerError, StallError, WfbpError
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed import tensors as memory
from wfbp.torch.distributed.lanes import CollectiveLane, Operation
from wfbp.torch.distributed.messages import Message, MessageLane
from wfbp.torch.distributed.tensors import Targets, sizes
from wfbp.torch.distributed.work import GroupOfWorks, GroupWork

Tensor = torch.Tensor
Begin = Callable[[Exchange, int], Work[Any]]

_MONITOR_TAG = -2
"""Tags of monitored barriers: this and smaller ones; those of programs are not negative."""


def _collective(kind: Any, num_tensors: int, *names: str) -> Callable[[Any], Any]:
    """A method of tensors and options, which PyTorch passes as an object or one by one.

    Tensors of another device use the same method of that device's group.
    """
    fields = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: ProcessGroup, *arguments: Any, opts: Any = None, **named: Any) -> Any:
            tensors, given = arguments[:num_tensors], list(arguments[num_tensors:])
            if given and isinstance(given[0], kind):
                opts = given.pop(0)
            if opts is None:
                opts = kind()
                for name, value in [*zip(names, given, strict=False), *named.items()]:
                    if value is not None:
                        setattr(opts, fields[name], value)
            device = _device(tensors)
            if device.type != "cpu":
                return getattr(self._other(device), method.__name__)(*tensors, opts)
            return method(self, *tensors, opts)

        return call

    return decorate


class ProcessGroup(dist.ProcessGroup):
    """Collectives and messages of CPU tensors; other devices use the group of the backend that the
    program named for them. Any thread may call the methods."""

    def __init__(
        self,
        runtime: Runtime,
        exchange: Exchange,
        key: str,
        timeout: timedelta,
        store: c10d.Store,
        closed: Callable[[ProcessGroup], None],
    ) -> None:
        super().__init__(exchange.rank, exchange.size)  # type: ignore[call-arg]
        self.exchange, self.key = exchange, key
        self._runtime, self._timeout, self._store, self._closed = runtime, timeout, store, closed
        check_all = c10d.get_debug_level() == c10d.DebugLevel.DETAIL
        self.messages = MessageLane(runtime, exchange, key)
        self.collectives = CollectiveLane(runtime, exchange, key, check_all, self.messages.fail)
        self._coalesced: list[GroupWork] | None = None
        self._others: dict[str, dist.ProcessGroup] = {}
        self._num_monitored = 0

    # Properties that PyTorch asks for.

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def getBackendName(self) -> str:  # noqa: N802
        return "wfbp"

    name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    group_name = property(getGroupName)

    def get_group_store(self) -> c10d.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._backends()]

    def _get_backend(self, device: Any) -> Any:
        device = torch.device(device)
        return self if device.type == "cpu" else self._other(device)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass  # operations are numbered anyway

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> dist.ProcessGroup | None:
        if self.rank() not in new_ranks:
            return None
        made: dist.ProcessGroup = dist.new_group(
            [dist.get_global_rank(self, rank) for rank in new_ranks],
            timeout=timeout or self._timeout,
            group_desc=group_desc,
            use_local_synchronization=True,
        )
        return made

    def shutdown(self) -> None:
        if self._runtime.thread.error is None:
            self._runtime.thread.call(self._close, "destroying a process group", self)

    abort = shutdown

    def _close(self) -> Finished[None]:
        self._closed(self)
        self.collectives.close()
        self.messages.close()
        return Finished(None)

    def _backends(self) -> dict[str, str]:
        """The backend of each device, as the program named them."""
        named = _world.pg_backend_config.get(self)
        backends: Mapping[str, str] = {}
        if named is not None:
            backends = BackendConfig(dist.Backend(named)).get_device_backend_map()
        return {kind: name for kind, name in backends.items() if name != "wfbp"} | {"cpu": "wfbp"}

    def _other(self, device: torch.device) -> dist.ProcessGroup:
        """The group that serves tensors of another device; made at its first use by all ranks."""
        if device.type not in self._others:
            backend = self._backends().get(device.type)
            if backend is None:
                raise ValueError(
                    f"a tensor is on {device}, but the backend wfbp moves tensors of the CPU; use "
                    'init_process_group("cpu:wfbp,cuda:nccl") for both'
                )
            ranks = dist.get_process_group_ranks(self)
            self._others[device.type] = dist.new_group(
                ranks, timeout=self._timeout, backend=backend, use_local_synchronization=True
            )
        return self._others[device.type]

    # Reductions.

    @_collective(c10d.AllreduceOptions, 1, "op", "timeout")
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return self._each(self._all_reduce, _listed(tensors), opts)

    @_collective(c10d.AllreduceCoalescedOptions, 1, "op", "timeout")
    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        return self._each(self._all_reduce, tensors, opts)

    def _all_reduce(self, tensor: Tensor, opts: Any) -> GroupWork:
        op = opts.reduceOp
        if tensor.layout is torch.sparse_coo:
            return self._all_reduce_sparse(tensor, opts)
        memory.check(tensor)
        how = memory.reduction(tensor.dtype, op, self.size())
        targets = Targets()
        data = targets.of(tensor, memory.premultiplied(tensor, op))
        return self._run(
            f"all_reduce({sizes(tensor)}, {memory.op_name(op)})",
            lambda exchange, mark: exchange.all_reduce(data, how, mark),
            targets.deliver,
            [tensor],
            opts,
        )

    def _all_reduce_sparse(self, tensor: Tensor, opts: Any) -> GroupWork:
        """Every rank adds the values of all ranks."""
        if opts.reduceOp != ReduceOp.SUM:
            raise ValueError(f"{memory.op_name(opts.reduceOp)} of a sparse tensor; expected SUM")
        payload = memory.pack_sparse(tensor)
        works: list[Work[list[bytes]]] = []

        def begin(exchange: Exchange, _: int) -> Work[list[bytes]]:
            works.append(exchange.backend.all_gather_bytes(payload))
            return works[0]

        def finish() -> None:
            memory.add_sparse(works[0].result, tensor)

        text = f"all_reduce(sparse {tensor.dtype}{list(tensor.shape)}, SUM)"
        return self._run(text, begin, finish, [tensor], opts)

    @_collective(c10d.ReduceOptions, 1, "root", "op", "timeout")
    def reduce(self, tensors: Any, opts: Any) -> Any:
        (tensor,) = _listed(tensors)
        memory.check(tensor)
        root, op = self._peer(opts.rootRank), opts.reduceOp
        how = memory.reduction(tensor.dtype, op, self.size())
        targets, blocks = Targets(), self._nothing()
        blocks[root] = memory.source(memory.premultiplied(tensor, op))
        result = targets.of(tensor) if root == self.rank() else None
        return self._run(
            f"reduce({sizes(tensor)}, {memory.op_name(op)}, to {root})",
            lambda exchange, mark: exchange.reduce_scatter(blocks, result, how, mark),
            targets.deliver,
            [tensor],
            opts,
        )

    @_collective(c10d.ReduceScatterOptions, 2, "op", "timeout")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        (output,), (blocks,) = _listed(outputs), _lists(inputs)
        memory.check(output, *blocks)
        self._expect_one_per_rank("reduce_scatter", "input", blocks)
        _expect("reduce_scatter: this rank's input", blocks[self.rank()], output)
        parts = [memory.source(memory.premultiplied(b, opts.reduceOp)) for b in blocks]
        return self._scatter_reduced(sizes(*blocks), output, parts, opts)

    @_collective(c10d.ReduceScatterOptions, 2)
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        memory.check(output, tensor)
        _expect("reduce_scatter: the input", tensor, output, self.size())
        whole = memory.source(memory.premultiplied(tensor, opts.reduceOp))
        return self._scatter_reduced(f"{sizes(output)} each", output, self._split(whole), opts)

    def _scatter_reduced(self, what: str, output: Tensor, parts: Blocks, opts: Any) -> GroupWork:
        how = memory.reduction(output.dtype, opts.reduceOp, self.size())
        targets = Targets()
        place = targets.of(output)
        return self._run(
            f"reduce_scatter({what}, {memory.op_name(opts.reduceOp)})",
            lambda exchange, mark: exchange.reduce_scatter(parts, place, how, mark),
            targets.deliver,
            [output],
            opts,
        )

    @_collective(c10d.ReduceScatterOptions, 2)
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._each(self.reduce_scatter_single, outputs, inputs, opts)

    # Movements.

    @_collective(c10d.BroadcastOptions, 1, "root", "timeout")
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._each(self._broadcast, _listed(tensors), opts)

    def _broadcast(self, tensor: Tensor, opts: Any) -> GroupWork:
        memory.check(tensor)
        root, targets = self._peer(opts.rootRank), Targets()
        outgoing, incoming = self._nothing(), self._nothing()
        if root == self.rank():
            outgoing = [memory.source(tensor)] * self.size()
        else:
            incoming[root] = targets.of(tensor)
        text = f"broadcast({sizes(tensor)}, from {root})"
        return self._move(text, outgoing, incoming, targets, [tensor], opts)

    @_collective(c10d.AllgatherOptions, 2, "timeout")
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        (results,), (tensor,) = _lists(outputs), _listed(inputs)
        return self._all_gather(results, tensor, opts)

    @_collective(c10d.AllgatherOptions, 2)
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._each(
            self._all_gather, [list(each) for each in zip(*outputs, strict=False)], inputs, opts
        )

    def _all_gather(self, results: Sequence[Tensor], tensor: Tensor, opts: Any) -> GroupWork:
        memory.check(tensor, *results)
        self._expect_one_per_rank("all_gather", "output", results)
        _expect("all_gather: this rank's output", results[self.rank()], tensor)
        targets, outgoing = Targets(), [memory.source(tensor)] * self.size()
        incoming = [targets.of(result) for result in results]
        text = f"all_gather({sizes(*results)})"
        return self._move(text, outgoing, incoming, targets, list(results), opts)

    @_collective(c10d.AllgatherOptions, 2)
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        memory.check(output, tensor)
        _expect("all_gather: the output", output, tensor, self.size())
        targets, outgoing = Targets(), [memory.source(tensor)] * self.size()
        incoming = self._split(targets.of(output))
        text = f"all_gather({sizes(tensor)} each)"
        return self._move(text, outgoing, incoming, targets, [output], opts)

    @_collective(c10d.AllgatherOptions, 2)
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._each(self.all_gather_single, outputs, inputs, opts)

    @_collective(c10d.GatherOptions, 2, "root", "timeout")
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        (tensor,), root, targets = _listed(inputs), self._peer(opts.rootRank), Targets()
        results = list(_lists(outputs)[0]) if root == self.rank() else []
        memory.check(tensor, *results)
        outgoing, incoming = self._nothing(), self._nothing()
        outgoing[root] = memory.source(tensor)
        if root == self.rank():
            self._expect_one_per_rank("gather", "output", results, tensor)
            incoming = [targets.of(result) for result in results]
        text = f"gather({sizes(tensor)}, to {root})"
        return self._move(text, outgoing, incoming, targets, results, opts)

    @_collective(c10d.ScatterOptions, 2, "root", "timeout")
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        (tensor,), root, targets = _listed(outputs), self._peer(opts.rootRank), Targets()
        blocks = list(_lists(inputs)[0]) if root == self.rank() else []
        memory.check(tensor, *blocks)
        outgoing, incoming = self._nothing(), self._nothing()
        incoming[root] = targets.of(tensor)
        if root == self.rank():
            self._expect_one_per_rank("scatter", "input", blocks, tensor)
            outgoing = [memory.source(block) for block in blocks]
        text = f"scatter({sizes(tensor)}, from {root})"
        return self._move(text, outgoing, incoming, targets, [tensor], opts)

    @_collective(c10d.AllToAllOptions, 2, "timeout")
    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        memory.check(*inputs, *outputs)
        self._expect_one_per_rank("all_to_all", "input", inputs)
        self._expect_one_per_rank("all_to_all", "output", outputs)
        targets = Targets()
        outgoing = [memory.source(tensor) for tensor in inputs]
        incoming = [targets.of(output) for output in outputs]
        return self._all_to_all(inputs[0], outgoing, incoming, targets, list(outputs), opts)

    @_collective(c10d.AllToAllOptions, 4, "timeout")
    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, received: Any, sent: Any, opts: Any
    ) -> Any:
        memory.check(output, tensor)
        targets = Targets()
        outgoing = self._rows("input", tensor, memory.source(tensor), sent)
        incoming = self._rows("output", output, targets.of(output), received)
        if not (sent or received) and output.numel() == tensor.numel():
            text = f"all_to_all({sizes(tensor)})"
            return self._move(text, outgoing, incoming, targets, [output], opts)
        return self._all_to_all(tensor, outgoing, incoming, targets, [output], opts)

    def _all_to_all(
        self,
        tensor: Tensor,
        outgoing: list[Buffer],
        incoming: list[Buffer],
        targets: Targets,
        results: list[Any],
        opts: Any,
    ) -> GroupWork:
        """Blocks of sizes that only their sender and receiver know."""
        numels = [
            [block.nbytes // tensor.element_size() for block in blocks]
            for blocks in (outgoing, incoming)
        ]
        if numels[0][self.rank()] != numels[1][self.rank()]:
            raise ValueError(
                f"all_to_all: this rank sends itself {numels[0][self.rank()]} elements, but "
                f"expects {numels[1][self.rank()]}"
            )
        text = f"all_to_all({tensor.dtype}, sends {numels[0]}, expects {numels[1]})"
        return self._move(text, outgoing, incoming, targets, results, opts, numels)

    @_collective(c10d.BarrierOptions, 0, "timeout")
    def barrier(self, opts: Any) -> Any:
        if opts.device is not None and opts.device.type != "cpu":
            return self._other(opts.device).barrier(opts)
        nothing = self._nothing()

        def begin(exchange: Exchange, mark: int) -> Work[Any]:
            if exchange.checks:
                return exchange.move(nothing, nothing, mark)
            return exchange.backend.all_gather_bytes(b"")

        return self._run("barrier()", begin, lambda: None, [], opts)

    # Names that PyTorch used before, and still calls.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []
        if device.type != "cpu":
            self._other(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._coalesced = self._coalesced or [], None
        if device.type != "cpu":
            return self._other(device)._end_coalescing(device)
        return GroupOfWorks(works)

    # Messages.

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        (tensor,) = _listed(tensors)
        if tensor.device.type != "cpu":
            return self._other(tensor.device).send([tensor], peer, tag)
        return self._send(f"send({sizes(tensor)}, to {peer}, tag {tag})", tensor, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        return self._recv(tensors, peer, tag)

    def _recv(self, tensors: Any, peer: int | None, tag: int) -> Any:
        (tensor,) = _listed(tensors)
        if tensor.device.type != "cpu":
            other = self._other(tensor.device)
            if peer is None:
                return other.recv_anysource([tensor], tag)
            return other.recv([tensor], peer, tag)
        source = "any rank" if peer is None else self._peer(peer)
        text = f"recv({sizes(tensor)}, from {source}, tag {tag})"
        return self._receive(text, tensor, peer, tag, self._timeout)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return self._recv(tensors, None, tag)

    def _send(self, text: str, tensor: Tensor, peer: int, tag: int) -> GroupWork:
        memory.check(tensor)
        work = self._work(text, [tensor], self._timeout)
        data = memory.source(tensor)
        message = Message(data, str(tensor.dtype), self._peer(peer), tag, work)
        self._post(lambda: self.messages.send(message), wakes=True)
        return work

    def _receive(
        self, text: str, tensor: Tensor, peer: int | None, tag: int, timeout: timedelta
    ) -> GroupWork:
        memory.check(tensor)
        targets = Targets()
        data = targets.of(tensor)
        work = self._work(text, [tensor], timeout)
        message = Message(data, str(tensor.dtype), peer, tag, work, targets.deliver)
        self._post(lambda: self.messages.receive(message), wakes=True)
        return work

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier after which rank 0 names the ranks that did not come in time."""
        text, limit = "monitored_barrier()", self._timeout if timeout is None else timeout
        limit_ms = int(limit.total_seconds() * 1000)
        if limit <= timedelta(0):
            raise StallError(
                f"Rank {self.rank()} timed out in monitoredBarrier after {limit_ms} ms"
            )
        tag = _MONITOR_TAG - 2 * self._num_monitored
        self._num_monitored += 1
        nothing = torch.empty(0, dtype=torch.uint8)
        if self.rank():
            self._send(text, nothing, 0, tag)
            try:
                self._receive(text, nothing, 0, tag - 1, limit).wait()
            except (StallError, PeerError) as error:
                raise StallError(
                    f"Rank {self.rank()} successfully reached monitoredBarrier, but received "
                    f"errors while waiting for send/recv from rank 0 in {limit_ms} ms. Please "
                    f"check rank 0 logs for faulty rank. {error}"
                ) from error
            return
        peers = range(1, self.size())
        arrivals = [self._receive(text, nothing, peer, tag, limit) for peer in peers]
        missing: list[int] = []
        for peer, arrival in zip(peers, arrivals, strict=True):
            try:
                arrival.wait()
            except (StallError, PeerError):
                missing.append(peer)
                if not wait_all_ranks:
                    break
        if missing:
            names = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            raise StallError(
                f"{names} failed to pass monitoredBarrier in {limit_ms} ms; every rank of the "
                "group must call it"
            )
        for peer in peers:
            self._send(text, nothing, peer, tag - 1)

    # How they are run.

    def _move(
        self,
        text: str,
        outgoing: Blocks,
        incoming: Blocks,
        targets: Targets,
        results: list[Any],
        opts: Any,
        numels: Sequence[Sequence[int]] = (),  # for and from each rank, if other ranks do not know
    ) -> GroupWork:
        def begin(exchange: Exchange, mark: int) -> Work[None]:
            return exchange.move(outgoing, incoming, mark, in_chunks=not numels)

        return self._run(text, begin, targets.deliver, results, opts, numels)

    def _run(
        self,
        text: str,
        begin: Begin,
        finish: Callable[[], None],
        results: list[Any],
        opts: Any,
        numels: Sequence[Sequence[int]] = (),
    ) -> GroupWork:
        work = self._work(text, results, opts.timeout)
        key = text.partition(",")[0] if numels else text
        sent, expected = numels or ((), ())
        operation = Operation(key, begin, finish, work, sent, expected)
        self._post(lambda: self.collectives.submit(operation), wakes=opts.asyncOp)
        return work

    def _work(self, text: str, results: list[Any], timeout: timedelta) -> GroupWork:
        limit = timeout if timeout > timedelta(0) else self._timeout
        work = GroupWork(self._runtime.thread, text, results, limit.total_seconds())
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _post(self, message: Callable[[], None], wakes: bool) -> None:
        self._runtime.check()
        error: WfbpError | None = self.collectives.error
        if error is not None:
            raise error
        if wakes:
            self._runtime.thread.post(message)
        else:  # the caller waits, and will do it
            self._runtime.thread.leave(message)

    def _each(self, run: Callable[..., GroupWork], *arguments: Any) -> Any:
        """One operation for each tensor of some lists; the last argument are the options."""
        *lists, opts = arguments
        works = [run(*each, opts) for each in zip(*lists, strict=True)]
        return works[0] if len(works) == 1 else GroupOfWorks(works)

    def _nothing(self) -> list[Buffer | None]:
        return [None] * self.size()

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.size():
            raise ValueError(f"rank {rank} of a group of {self.size()}; expected 0 or more")
        return rank

    def _split(self, data: Buffer) -> list[Buffer]:
        """Equal parts for all ranks."""
        step = data.nbytes // self.size()
        return [data[rank * step : (rank + 1) * step] for rank in range(self.size())]

    def _rows(self, what: str, tensor: Tensor, data: Buffer, splits: Sequence[int]) -> list[Buffer]:
        """The part of each rank of a tensor's first dimension."""
        rows = tensor.shape[0] if tensor.dim() else 1
        counts = splits or [rows // self.size()] * self.size()
        if len(counts) != self.size() or sum(counts) != rows:
            raise ValueError(
                f"all_to_all: the {what} has {rows} rows, and split sizes {list(counts)}; expected "
                f"{self.size()} that add up"
            )
        row_bytes = data.nbytes // rows if rows else 0
        ends = accumulate(counts)
        return [
            data[(end - count) * row_bytes : end * row_bytes]
            for end, count in zip(ends, counts, strict=True)
        ]

    def _expect_one_per_rank(
        self, kind: str, what: str, tensors: Sequence[Tensor], like: Tensor | None = None
    ) -> None:
        if len(tensors) != self.size():
            raise ValueError(
                f"{kind}: {len(tensors)} {what} tensors; expected one per rank, {self.size()}"
            )
        for tensor in tensors if like is not None else ():
            _expect(f"{kind}: an {what} tensor", tensor, like)


def _expect(what: str, tensor: Tensor, like: Tensor | None, times: int = 1) -> None:
    """Raise ``ValueError`` unless a tensor has so many times the elements of another, and its
    type."""
    assert like is not None
    if tensor.numel() != times * like.numel() or tensor.dtype != like.dtype:
        raise ValueError(
            f"{what} is {sizes(tensor)}; expected {f'{times} times ' * (times > 1)}{sizes(like)}"
        )


def _device(tensors: Any) -> torch.device:
    """The device of the first tensor in lists of lists."""
    for each in tensors:
        if isinstance(each, Tensor):
            return each.device
        if isinstance(each, Sequence) and each and (found := _device(each)).type != "cpu":
            return found
    return torch.device("cpu")


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _lists(tensors: Any) -> list[Any]:
    return [tensors] if tensors and isinstance(tensors[0], Tensor) else list(tensors)
