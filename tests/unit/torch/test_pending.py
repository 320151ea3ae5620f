"""Parameters that still travel: every read waits, and what could not be noticed arrives at once."""

from __future__ import annotations

import ctypes
import io
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from wfbp.torch import pending
from wfbp.torch.pending import Pending, PendingParameters


class Arrivals:
    """Brings parameters: fills them with ones."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.awaited: list[int] = []
        self.error: Exception | None = None

    def wait(self, index: int) -> None:
        if self.error is not None:
            raise self.error
        self.awaited.append(index)
        for param in self.params[: index + 1]:  # each arrives after those before it
            # As from elsewhere: no mode and no transform affects it.
            with torch._C.DisableTorchFunctionSubclass():
                values = (ctypes.c_float * param.numel()).from_address(param.data_ptr())
            values[:] = [1.0] * len(values)


class Holder(nn.Module):
    """A module whose parameters are in a list, and read by a function."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(params)

    def forward(self, read: Callable[[Any], Any] = len) -> Any:
        return read(self.held)


class Step:
    """Some parameters that are pending, each with a tensor that its optimizer keeps of it."""

    def __init__(self, *shapes: Sequence[int], params: list[Any] | None = None) -> None:
        self.params = params or [nn.Parameter(torch.zeros(*shape)) for shape in shapes]
        self.module = Holder(self.params)
        self.arrivals = Arrivals(self.params)
        self.pending = PendingParameters(self.params, self.arrivals.wait, "SGD")
        self.kept: list[torch.Tensor] = []

    def take(self) -> None:
        if not self.kept:
            self.kept = [p.detach() for p in self.params]
            self.finish()
            assert not self.pending, "no hook has seen its parameters"
            self.module()
            self.arrivals.awaited.clear()
            for kept in self.kept:
                kept.zero_()
        self.finish()

    def finish(self) -> None:
        indices = list(range(len(self.params)))
        addresses = [p.data_ptr() for p in self.params]
        self.pending.begin(indices, [[k] for k in indices], addresses)
        self.pending.leave()


def saved(param: Any) -> Any:
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def forked(param: Any) -> Any:
    """As in a worker of a DataLoader."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and newer Pythons warn of forks beside threads
        child = os.fork()
    if not child:
        os.write(write, bytes(param.detach().numpy().data))
        os._exit(0)
    os.waitpid(child, 0)
    return torch.frombuffer(bytearray(os.read(read, 24)), dtype=torch.float32)


READS: dict[str, Callable[[Any], Any]] = {
    "index": lambda p: p[:],
    "operator": lambda p: p * 1.0,
    "reflected": lambda p: 1.0 * p,
    "deep in a structure": lambda p: torch.cat([torch.zeros(0, 3), p]),
    "save": saved,
    "fork": forked,
    "vmap": lambda p: torch.vmap(lambda x: x + p)(torch.zeros(1))[0],
    "address": lambda p: (p.data_ptr(), p.detach())[1],
    "dlpack": lambda p: torch.from_dlpack(p.detach()),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", READS)
def test_every_read_waits(name: str) -> None:
    step = Step((2, 3))
    step.take()
    assert type(step.params[0]) is Pending
    found = READS[name](step.params[0])
    assert torch.equal(found.detach().flatten(), torch.ones(6))
    assert type(step.params[0]) is nn.Parameter
    assert not step.pending


def test_gradients_and_containers_do_not_wait() -> None:
    step = Step((2, 3))
    step.take()
    param = step.params[0]
    param.grad = torch.ones(2, 3)
    assert param.grad is not None
    param.grad = None
    assert param in {param}
    assert isinstance(param, nn.Parameter)
    assert step.pending


def test_what_arrives_together_is_put_back_together_and_nothing_else() -> None:
    step = Step((2,), (2,), (2,))
    step.take()
    step.params[1].tolist()
    assert [type(p) is Pending for p in step.params] == [False, False, True]
    assert step.arrivals.awaited == [1]
    step.pending.wait_all()
    assert not step.pending


def test_modules_wait_for_their_own_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    step = Step(params=list(model.parameters()))
    step.take()
    step.pending.wait_all()
    model(torch.ones(1, 3))  # from here on each layer waits, not the model
    step.take()
    model[0](torch.ones(1, 3))
    assert [type(p) is Pending for p in step.params] == [False, False, True, True]
    assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 2), 13.0))
    assert not step.pending


def test_waits_in_compiled_code_are_not_compiled() -> None:
    step = Step((4,), (4,))
    wait = torch.compile(lambda: step.pending.wait(0), backend="eager")
    wait()  # nothing is pending, so its compilation stops nothing
    step.take()
    assert step.pending
    wait()
    assert step.params[0].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "keep",
    [
        lambda p: p.detach().view(-1),
        lambda p: p.detach().numpy(),
        lambda p: p.untyped_storage(),
        lambda p: p.detach().untyped_storage().data_ptr,
        lambda p: torch.TypedStorage(
            wrap_storage=p.untyped_storage(), dtype=p.dtype, _internal=True
        ),
        lambda p: nn.Parameter(p.data),
    ],
)
def test_memory_that_the_program_keeps_is_waited_for_in_the_step(keep: Any) -> None:
    step = Step((4,), (4,))
    step.take()
    assert step.pending, "else this test would prove nothing"
    step.pending.wait_all()
    held = keep(step.params[0])
    step.take()
    assert not step.pending
    del held
    step.take()
    assert step.pending, "nothing is kept any more"
    step.pending.wait_all()


def test_parameters_that_share_memory() -> None:
    step = Step((4,), (4,))
    step.params[1].data = step.params[0].data[2:]
    step.take()
    assert not step.pending


def test_a_second_thread_ends_it() -> None:
    step = Step((4,), (4,))
    step.take()
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(step.params[1].tolist()))
    thread.start()
    thread.join(60.0)
    assert seen == [[1.0] * 4]
    step.take()
    assert not step.pending, "step() waits from now on"


def test_compiled_code_ends_it() -> None:
    torch._dynamo.reset()
    step = Step((4,))
    step.take()
    double = torch.compile(lambda: step.params[0] * 2, backend="eager")
    assert torch.equal(double(), torch.full((4,), 2.0))
    step.take()
    assert not step.pending, "step() waits from now on"
    torch._dynamo.reset()


def test_a_failure_is_raised_by_every_read_until_the_end() -> None:
    step = Step((4,))
    step.take()
    step.arrivals.error = RuntimeError("a rank has left")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has left"):
            step.params[0].sum()
    step.pending.release()
    assert step.params[0].tolist() == [0.0] * 4
    assert not pending.under_way


def test_it_lives_until_all_has_arrived() -> None:
    step = Step((4,))
    step.take()
    param = step.params[0]
    del step.pending
    assert param.tolist() == [1.0] * 4
    assert not pending.under_way
