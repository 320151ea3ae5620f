"""A program that knows nothing of wfbp: ``-m wfbp.horovod horovod_script.py FOLDER``."""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet
from horovod.common.util import check_extension, extension_available, nccl_built, split_list
from horovod.torch import compression, mpi_ops
from horovod.torch.elastic import ElasticSampler, TorchState
from horovod.torch.elastic.sampler import ElasticSampler as SameSampler
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import allreduce_async, synchronize
from horovod.torch.optimizer import DistributedOptimizer, _DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm
from mpi4py import MPI


def refused(kind: type[Exception], told: str, act: Callable[[], object]) -> None:
    """It raises this error; the program runs without pytest."""
    try:
        act()
    except kind as error:
        assert told in str(error), error  # noqa: PT017
    else:
        raise AssertionError(f"no error with {told!r}")


folder = Path(sys.argv[1])
assert __name__ == "__main__"
assert horovod.__version__.startswith("0.28")
assert hvd.mpi_ops is mpi_ops
assert hvd.mpi_ops.Average is hvd.Average
assert hvd.compression is compression
assert issubclass(hvd.Compression.fp16, compression.Compressor)
assert hvd.HorovodInternalError is HorovodInternalError
assert (SameSampler, ProcessSet) == (ElasticSampler, hvd.ProcessSet)
assert (SyncBatchNorm, broadcast_object) == (hvd.SyncBatchNorm, hvd.broadcast_object)
assert hvd.DistributedOptimizer is DistributedOptimizer
assert nccl_built(verbose=True) == 0
check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
assert [extension_available(name) for name in ("torch", "mxnet")] == [True, False]
assert split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
assert importlib.util.find_spec("horovod.torch") is not None
hvd.init(process_sets="dynamic")
rank, size = hvd.rank(), hvd.size()
assert hvd.mpi_threads_supported()
assert hvd.is_homogeneous()
assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
assert synchronize(allreduce_async(torch.ones(2), op=hvd.Sum)).tolist() == [size] * 2

# Objects that pickle alone could not send.
assert hvd.broadcast_object(lambda: rank, 0, name="function")() in (0, rank)
found = hvd.allgather_object([torch.ones(rank)], name="tensors")
assert [tensors[0].numel() for tensors in found] == list(range(size))

hvd.start_timeline(str(folder / "timeline.json"), mark_cycles=True)
hvd.allreduce(torch.ones(3), name="loss")
hvd.stop_timeline()
if rank == 0:
    events = json.loads((folder / "timeline.json").read_text())
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= {e["name"] for e in events}
    assert "allreduce.loss" in {e["args"]["name"] for e in events if e["ph"] == "M"}

for module, name, instead in (
    (hvd, "mpi_lib", "use the functions of wfbp.torch"),
    (hvd.elastic, "ObjectState", "use wfbp.horovod.torch.elastic.TorchState"),
    (horovod, "tensorflow", "no adapter for TensorFlow"),
):
    refused(AttributeError, instead, partial(getattr, module, name))
    for statement in (f"from {module.__name__} import {name}", f"import {module.__name__}.{name}"):
        refused(ImportError, instead, partial(exec, statement))

# Horovod's arguments in Horovod's order.
torch.manual_seed(5)
weight = torch.nn.Parameter(torch.ones(3))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([weight], lr=1.0),
    [("weight", weight)],
    hvd.Compression.none,
    2,
    hvd.Average,
    2.0,
)
assert optimizer._parameter_names == {weight: "weight"}
assert isinstance(optimizer, _DistributedOptimizer)
assert not isinstance(torch.optim.SGD([weight], lr=1.0), _DistributedOptimizer)
derive = partial(type, "Own", (_DistributedOptimizer,), {})
refused(TypeError, "derive from the optimizer's own class", derive)
made = partial(_DistributedOptimizer, [weight])
refused(TypeError, "call DistributedOptimizer(optimizer)", made)
for passes in (2, 1):
    optimizer.set_backward_passes_per_step(passes)
    for _ in range(passes):
        (weight.sum() * (rank + 1.0)).backward()
    before = weight.detach().clone()
    optimizer.step()
    assert torch.allclose(before - weight, torch.full((3,), passes * (size + 1) / 2))
    optimizer.zero_grad()
for told, arguments in (
    ("compression is Compressor", {"compression": hvd.compression.Compressor}),
    ("needs op=Average", {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
):
    sgd = torch.optim.SGD([weight], lr=1.0)
    refused(ValueError, told, partial(hvd.DistributedOptimizer, sgd, **arguments))
refused(ValueError, "at least 1", partial(optimizer.set_backward_passes_per_step, 0))

# Averages that are asked for twice are a warning, and zeros stand for gradients that are missing.
pair = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(pair, lr=1.0 + rank, weight_decay=0.5))
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
assert optimizer.param_groups[0]["lr"] == 1.0
if size > 1:
    assert [p.grad.tolist() for p in pair] == [[0.0] * 3] * 2
for skip in (False, False, True):
    pair[0].sum().backward()
    optimizer.synchronize()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if skip:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    assert len(caught) == (size > 1 and not skip), caught
    assert all("skip_synchronize()" in str(w.message) for w in caught)
    assert caught == [] or caught[0].filename == __file__
    optimizer.zero_grad()
assert pair[0].tolist() == [-1.625] * 3
# Weight decay sees zeros, as under Horovod; after zero_grad() nobody has had a gradient for it.
assert pair[1].tolist() == [0.5 if size > 1 else 1.0] * 3

# Tensors without names go by their order.
unnamed = [torch.full((2,), float(rank)), torch.full((3,), float(rank))]
hvd.broadcast_parameters(unnamed, root_rank=size - 1)
hvd.broadcast_parameters(torch.nn.Linear(1, 1).parameters(), root_rank=0)
assert [t.tolist() for t in unnamed] == [[size - 1.0] * 2, [size - 1.0] * 3]
for wrong in (torch.ones(2), torch.nn.Linear(1, 1), [torch.ones(1), "a"]):
    send = partial(hvd.broadcast_parameters, wrong, root_rank=0)
    refused(TypeError, "tensors in the same order", send)

# All of training within skip_synchronize(), as integrations of Horovod do it.
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(pair, lr=1.0))
with optimizer.skip_synchronize():
    optimizer.zero_grad()
    optimizer.step()  # without gradients, before the first backward
    for _ in range(3):
        before = pair[0].detach().clone()
        (pair[0].sum() * (rank + 1.0)).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert torch.equal(before - pair[0], torch.full((3,), (size + 1) / 2))
        optimizer.zero_grad()
    pair[0].sum().backward()
    refused(RuntimeError, "call optimizer.synchronize() before", optimizer.step)
    optimizer.synchronize()
    optimizer.step()
optimizer.zero_grad()

# A rank outside the process set of an optimizer steps alone.
if size > 1:
    only_first = hvd.add_process_set([0])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(pair, lr=1.0), process_set=only_first)
    before = pair[0].detach().clone()
    (pair[0].sum() * (rank + 1)).backward()
    optimizer.step()
    assert torch.equal(before - pair[0], torch.full((3,), rank + 1.0))
    optimizer.zero_grad()
    hvd.remove_process_set(only_first)

# Learning rates that differ are a warning here.
hvd.broadcast_parameters([(f"pair.{k}", p) for k, p in enumerate(pair)], root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(pair, lr=1.0 + rank))
pair[0].sum().backward()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer.step()
assert len(caught) == (size > 1), caught
assert all("ranks disagree on lr" in str(w.message) for w in caught)

# Training that an operation breaks once goes on from its last commit.
torch.manual_seed(rank)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = ElasticSampler(range(8 * size), shuffle=True, seed=5)
state = TorchState(model, optimizer, epoch=0, sampler=sampler)
begun_at: list[int] = []
resets: list[int] = []
state.register_reset_callbacks([lambda: resets.append(state.epoch)])


@hvd.elastic.run
def train(state: TorchState) -> str:
    begun_at.append(state.epoch)
    for state.epoch in range(state.epoch, 3):  # noqa: B020 - as in Horovod's examples
        state.commit()
        with torch.no_grad():
            model.weight += 1
        if state.epoch == 1 and len(begun_at) == 1:
            hvd.allreduce(torch.ones(1 + rank), name="of different shapes")
    return "done"


assert train(state) == "done"
assert begun_at == ([0, 1] if size > 1 else [0])
assert resets == begun_at[1:]
weights = hvd.allgather(model.weight.detach())
assert torch.equal(weights, weights[:2].repeat(size, 1))

resumed: list[int] = []


@hvd.elastic.run
def resume(state: TorchState) -> None:
    resumed.append(state.epoch)
    state.epoch += 1
    if len(resumed) == 1:
        raise HostsUpdatedInterrupt(skip_sync=True)


resume(state)
assert resumed == [2, 3]
assert len(resets) == len(begun_at)

for _ in range(2):
    sampler.record_batch(0, 2)
assert sampler.processed_num == 4
kept = sampler.state_dict()
state.sync()
assert sampler.processed_num == 4 * size
assert len(sampler) == len(list(sampler)) == 4
left = hvd.allgather(torch.tensor(list(sampler)))
assert len(set(left.tolist())) == 4 * size
sampler.set_epoch(1)
assert len(sampler) == 8
sampler.load_state_dict(kept)
assert (sampler.epoch, sampler.processed_num) == (0, 4)

if size > 1:
    send = partial(hvd.broadcast, torch.ones(1), root_rank=rank % 2, name="from two roots")
    refused(hvd.HorovodInternalError, "root_rank", send)
stale = hvd.allreduce_async(torch.ones(1), name="never waited for")
hvd.shutdown()
assert not hvd.is_initialized()
hvd.init([*range(size)])
numbers = [hvd.allreduce_async(torch.ones(1)) for _ in range(stale)]
refused(ValueError, "of no pending operation", partial(hvd.synchronize, stale))
for number in numbers:
    hvd.synchronize(number)
assert hvd.size() == size
hvd.shutdown()

# Sets that are known from the beginning.
if size > 1:
    world = MPI.COMM_WORLD
    sets = [hvd.ProcessSet([0]), [1]]
    hvd.init(world.Split(0, -rank), process_sets=sets)
    assert hvd.rank() == size - 1 - rank
    assert sets[0].included() == (hvd.rank() == 0)
    hvd.shutdown()
for wrong in ([[0], [0, size]], "static"):
    refused(ValueError, "process", partial(hvd.init, process_sets=wrong))
    assert not hvd.is_initialized()
(folder / f"rank{rank}.json").write_text('"done"')
