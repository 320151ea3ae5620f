"""Parameters that still travel: every read waits, and what could not be noticed arrives at once."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, List  # noqa: UP035 - TorchScript needs it

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
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "index": lambda p: p[:],
    "operator": lambda p: p * 1.0,
    "reflected": lambda p: 1.0 * p,
    "in a list": lambda p: torch._foreach_mul([p], 1.0)[0],
    "deep in a structure": lambda p: torch.cat([torch.zeros(0, 3), p]),
    "deepcopy": copy.deepcopy,
    "save": saved,
    "fork": forked,
    "func": lambda p: torch.func.grad(lambda q: (q * q).sum())(p) / 2,
    "vmap": lambda p: torch.vmap(lambda x: x + p)(torch.zeros(1))[0],
    "module": lambda p: nn.utils.parameters_to_vector([p]),
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


class Hiding(torch.Tensor):
    """Takes part in operations without asking the classes of other tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_module_waits_for_modules_within_it_that_are_not_called() -> None:
    inputs = torch.ones(2, 3).as_subclass(Hiding)
    step = Step((3, 2), (3,))
    step.take()
    assert step.pending
    found = step.module(lambda held: inputs @ held[0])
    assert torch.equal(found, torch.full((2, 2), 3.0))


def test_parameters_that_no_module_waits_for_are_never_pending() -> None:
    inputs = torch.ones(2, 3).as_subclass(Hiding)
    step = Step((3, 2), (3,))
    step.kept = [p.detach() for p in step.params]
    step.module = Holder(step.params[1:])  # its forward reads the first from elsewhere
    for _ in range(3):
        for kept in step.kept:
            kept.zero_()
        step.finish()
        assert not step.pending
        assert torch.equal(step.module(lambda _: inputs @ step.params[0]), torch.full((2, 2), 3.0))


class Affine(nn.Module):
    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weight, self.bias = params

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias

    @torch.jit.export
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * (x @ self.weight + self.bias)


def reloaded(module: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


SCRIPTS: dict[str, Callable[[nn.Module], Callable[[torch.Tensor], Any]]] = {
    "call": torch.jit.script,
    "method": lambda m: torch.jit.script(m).double,
    "function": lambda m: lambda x: torch.jit.script(m)._c._get_method("forward")(x),
    "deepcopy": lambda m: copy.deepcopy(torch.jit.script(m)),
    "save": lambda m: reloaded(torch.jit.script(m)),
    "trace": lambda m: torch.jit.trace(m, torch.ones(1, 2)),
    "within": lambda m: nn.Sequential(torch.jit.script(m)),
    "freeze": lambda m: torch.jit.freeze(torch.jit.script(m.eval())),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_read_what_has_arrived(name: str) -> None:
    """Made while parameters are pending, or before."""
    inputs, wanted = torch.ones(1, 2), 3.0 * (1 + (name == "method"))
    step = Step((2, 3), (3,))
    model = Affine(step.params)
    step.take()
    assert step.pending
    read = SCRIPTS[name](model)
    assert torch.equal(read(inputs), torch.full((1, 3), wanted))
    script = torch.jit.script(model)
    for p in step.params:
        p.data.zero_()
    step.take()
    assert not step.pending, "a script module holds them"
    assert torch.equal(reloaded(script)(inputs), torch.full((1, 3), 3.0))
    del script, read
    torch.jit._state._clear_class_state()  # type: ignore[attr-defined]
    step.take()
    step.pending.wait_all()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_script_functions_wait_for_their_arguments() -> None:
    @torch.jit.script
    def total(tensors: List[torch.Tensor]) -> torch.Tensor:  # noqa: UP006
        return tensors[0].sum()

    step = Step((4,))
    step.take()
    assert total(step.params) == 4.0


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


def test_constructors_wait_for_what_they_are_given_alone() -> None:
    """Other threads may await the rest in another order."""
    step = Step((2,), (3,))
    step.take()
    assert torch.tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert nn.Parameter(torch.ones(1)).tolist() == [1.0]
    assert not step.arrivals.awaited
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of PyTorch, which would clone it
        assert torch.tensor(step.params[1]).tolist() == [1.0] * 3
    assert step.arrivals.awaited == [1], "which the other one arrives with"
    assert nn.Parameter(step.params[0]).tolist() == [1.0] * 2
