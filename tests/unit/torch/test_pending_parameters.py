"""Parameters that have not arrived: every way of reading waits, and nothing else changes."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import multiprocessing
import os
import pickle
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, stateless
from wfbp.torch.pending_parameters import PendingParameters

from wfbp.torch import pending_parameters

OLD, NEW = 2.0, 7.0
PATIENCE_S = 60.0


class Travel:
    """Fills the memory of parameters with new values when they arrive; may take its time."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.params = list(params)
        self.memory = [(p.data_ptr(), p.numel()) for p in params]
        self.pending = PendingParameters(params, self)
        self.groups: list[list[int]] = [[k] for k in range(len(params))]
        self.waits: list[int] = []
        self.failure: Exception | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.completing: Callable[[], object] = lambda: None

    def begin(
        self, indices: Sequence[int] | None = None, views: dict[int, torch.Tensor] | None = None
    ) -> None:
        indices = range(len(self.params)) if indices is None else indices
        addresses = [p.data_ptr() for p in self.params]
        self.memory = [(p.data_ptr(), p.numel()) for p in self.params]
        with self.pending.updating():
            self.pending.begin(
                list(indices),
                groups=self.groups,
                changed=indices,
                addresses=addresses,
                views=list(views or {}),
                view_of=(views or {}).__getitem__,
            )

    def await_arrival(self, index: int) -> None:
        self.waits.append(index)
        assert self.hold.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure

    def complete(self, indices: Collection[int]) -> None:
        self.completing()
        for index in indices:
            address, count = self.memory[index]
            ctypes.memmove(address, (ctypes.c_float * count)(*[NEW] * count), 4 * count)


def parameter(value: float = OLD, kind: Any = nn.Parameter) -> Any:
    tensor = torch.full((2, 2), value)
    return kind(tensor) if issubclass(kind, nn.Parameter) else tensor.as_subclass(kind)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    for pending in list(pending_parameters.unfinished):
        pending.release()


X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


class Untouched(torch.autograd.Function):
    """Its arguments go through C++, and it reads one's memory by its address there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * float(ctypes.c_float.from_address(ADDRESS[0]).value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


ADDRESS = [0]


def through_cpp(p: torch.Tensor) -> Any:
    """What extensions do: a C++ function takes the tensor, without looking at its class."""
    return Untouched.apply(X, p)  # type: ignore[no-untyped-call]


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def modified(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    def act(p: Any) -> Any:
        with torch.no_grad():
            change(p)
        return p.detach().clone()

    return act


def changed_data(p: Any) -> Any:
    p.data = p.data * 2
    return p.detach().clone()


def module(p: Any) -> nn.Linear:
    linear = nn.Linear(2, 2, bias=False)
    linear.weight = p if isinstance(p, nn.Parameter) else nn.Parameter(p)
    return linear


class Product(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 3


READERS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone(),
    "numpy": lambda p: p.detach().numpy(),
    "numpy with force": lambda p: p.numpy(force=True),
    "asarray": lambda p: np.asarray(p.data),
    "item": lambda p: p[0, 0].item(),
    "tolist": lambda p: p.tolist(),
    "float": lambda p: float(p.detach()[0, 0]),
    "repr": repr,
    "format": lambda p: f"{p}",
    "index": lambda p: p[0],
    "iterate": lambda p: list(p),
    "unpack": lambda p: [*p],
    "sum": lambda p: p.sum(),
    "function": lambda p: torch.sum(p),
    "method of the class": lambda p: torch.Tensor.sum(p),
    "left operand": lambda p: p - 1,
    "right operand": lambda p: 1 - p,
    "right matrix": lambda p: X @ p,
    "right tensor": lambda p: X + p,
    "power": lambda p: 2**p,
    "compare": lambda p: p == OLD,
    "contains": lambda p: OLD in p,
    "len": len,
    "abs": abs,
    "negate": lambda p: -p,
    "linear": lambda p: functional.linear(X, p),
    "module": lambda p: module(p)(X),
    "stack": lambda p: torch.stack([X, p]),
    "out of": lambda p: torch.add(X, X, alpha=1, out=torch.empty(2, 2)) + p,
    "operator": lambda p: torch.ops.aten.mm(X, p),
    "overload": lambda p: torch.ops.aten.mm.default(X, p),
    "einsum": lambda p: torch.einsum("ij,jk->ik", X, p),
    "foreach": lambda p: torch._foreach_add([p.detach(), p], 1)[1],
    "foreach norm": lambda p: torch._foreach_norm([p])[0],
    "copied": lambda p: torch.zeros(2, 2).copy_(p),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "norm": lambda p: nn.utils.get_total_norm([p]),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "old pickle": lambda p: pickle.loads(pickle.dumps(p, protocol=2)),
    "save": saved,
    "save module": lambda p: saved(module(p)).weight,
    "state dict": lambda p: module(p).state_dict()["weight"],
    "vars": lambda p: (vars(p), p)[1].detach(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "storage": lambda p: p.untyped_storage().tolist(),
    "address": lambda p: ctypes.c_float.from_address(p.data_ptr()).value,
    "storage of the class": lambda p: torch.Tensor.untyped_storage(p).tolist(),
    "as_subclass": lambda p: p.as_subclass(Marked),
    "with a subclass": lambda p: X.as_subclass(Marked) + p,
    "subclass of the class": lambda p: torch.Tensor._make_subclass(torch.Tensor, p.data),
    "wrapped again": lambda p: nn.Parameter(p),
    "constant": lambda p: torch.as_tensor(p),
    "function in C++": through_cpp,
    "without torch_function": lambda p: _disabled(lambda: torch.mm(X, p)),
    "method without torch_function": lambda p: _disabled(lambda: p.mm(X)),
    "grad transform": lambda p: torch.func.grad(lambda q: (q * q).sum())(p),
    "vmap": lambda p: torch.vmap(lambda row: row * 2)(p),
    "vjp": lambda p: torch.func.vjp(lambda q: q * q, p)[0],
    "jvp": lambda p: torch.func.jvp(lambda q: q * q, (p,), (X,)),
    "functional call": lambda p: torch.func.functional_call(
        nn.Linear(2, 2, False), {"weight": p}, X
    ),
    "gradient": lambda p: torch.autograd.grad((p * p).sum(), p)[0],
    "backward": lambda p: ((p * p).sum().backward(), p.grad)[1],
    "add in place": modified(lambda p: p.add_(1)),
    "operator in place": modified(lambda p: p.__iadd__(1)),
    "data in place": modified(lambda p: p.data.mul_(2)),
    "item in place": modified(lambda p: p.__setitem__(0, 1.0)),
    "copied into": modified(lambda p: p.copy_(X)),
    "average": modified(lambda p: p.lerp_(X, 0.5)),
    "foreach in place": modified(lambda p: torch._foreach_mul_([p], 2.0)),
    "set": modified(lambda p: p.set_(p.detach() * 3)),
    "initialized": modified(lambda p: nn.init.constant_(p[0], 1.0)),
    "clamped": modified(lambda p: nn.utils.vector_to_parameters(p.detach().flatten() + 1, [p])),
    "other data": changed_data,
    "isinstance": lambda p: isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor),
    "is_tensor": torch.is_tensor,
    "class": lambda p: (p.__class__.__name__, issubclass(p.__class__, nn.Parameter), p.clone()),
    "attribute of the class": lambda p: p.T,
    "property": lambda p: p.real,
    "hook": lambda p: (p.register_hook(lambda grad: None).remove(), p.detach())[1],
    "swapped": lambda p: (torch.utils.swap_tensors(p, q := nn.Parameter(X.clone())), p, q)[1:],
    "optimizer": lambda p: _stepped(p),
}


def _disabled(act: Callable[[], Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return act()


def _stepped(p: Any) -> Any:
    for foreach in (True, False):
        optimizer = torch.optim.Adam([p], lr=0.1, foreach=foreach)
        p.grad = torch.ones_like(p)
        optimizer.step()
    return p.detach()


def comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value), value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [comparable(v) for v in value]
    return value


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", READERS)
def test_every_read_waits(name: str) -> None:
    read = READERS[name]
    wanted, found = parameter(NEW), parameter(OLD)
    ADDRESS[0] = wanted.data_ptr()
    expected = comparable(read(wanted))
    travel = Travel([found])
    ADDRESS[0] = found.data_ptr()
    travel.begin()
    assert type(found) is not nn.Parameter
    result = comparable(read(found))
    assert travel.waits == [0]
    assert type(found) is nn.Parameter
    assert not travel.pending
    assert result == expected


def test_what_does_not_read_does_not_wait() -> None:
    p = parameter()
    p.scale = 3
    net = nn.Sequential(module(p))
    travel = Travel([p])
    hash_ = hash(p)
    travel.begin()
    assert p in {p}
    assert hash(p) == hash_ == id(p)
    assert {p: 1}[p] == 1
    assert p.grad is None
    assert torch.Tensor.grad.__get__(p) is None
    p.grad = X.clone()
    net.zero_grad()
    assert p.grad is None
    p.grad = X.clone()
    torch.optim.SGD.zero_grad(_groups_of(p))
    del p.grad
    assert p.scale == 3
    assert not hasattr(p, "no_such_thing")
    with pytest.raises(AttributeError, match="'Parameter' object has no attribute 'other'"):
        _ = p.other
    p.other = 4
    assert p.other == 4
    assert not travel.waits
    assert p.detach().tolist() == [[NEW, NEW]] * 2


def _groups_of(p: Any) -> Any:
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    optimizer.param_groups[0]["params"] = [p]
    return optimizer


def test_everything_that_a_tensor_has_is_found_on_a_stand_in() -> None:
    """An attribute that were forgotten would be read without being noticed, or missing."""
    p = parameter()
    travel = Travel([p])
    travel.begin()
    stand_in = type(p)
    assert stand_in.__mro__ == (stand_in, torch._C.TensorBase, object)
    assert set(dir(nn.Parameter)) <= set(dir(stand_in)) | {"__weakref__", "__dict__"}
    for name in dir(torch._C.TensorBase):
        if name not in pending_parameters._KEPT:
            assert name in vars(stand_in), name


def test_what_arrives_together_is_put_back_together_and_nothing_else() -> None:
    params = [parameter() for _ in range(5)]
    travel = Travel(params)
    travel.groups = [[4, 3], [0], [2, 1]]
    for _ in range(2):
        travel.begin()
        assert params[0].sum() == 4 * NEW
        assert travel.pending.indices == [1, 2]
        assert [type(p) is nn.Parameter for p in params] == [True, False, False, True, True]
        torch.stack(params)
        assert not travel.pending
    travel.begin([1, 3])
    assert type(params[0]) is nn.Parameter
    travel.pending.wait_all()
    assert not travel.pending


class Scaled(nn.Parameter):
    """A parameter with ideas of its own."""

    def doubled(self) -> torch.Tensor:
        return self * 2

    @property
    def half(self) -> torch.Tensor:
        return self / 2

    @staticmethod
    def number() -> int:
        return 5


class Guarding(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_classes_of_their_own() -> None:
    scaled, plain = parameter(kind=Scaled), torch.full((2, 2), OLD, requires_grad=True)
    marked = parameter(kind=Marked).requires_grad_()
    params = [scaled, plain, marked]
    travel = Travel(params)
    for read in (
        lambda: scaled.doubled(),
        lambda: scaled.half,
        lambda: plain + 1,
        lambda: marked * 2,
        lambda: X.as_subclass(Marked) * plain,
    ):
        travel.begin()
        kinds = [type(p) for p in params]
        assert scaled.number() == 5
        assert not travel.waits
        assert len({*kinds, Scaled, torch.Tensor, Marked}) == 6
        read()
        assert travel.waits
        travel.pending.wait_all()
        assert [type(p) for p in params] == [Scaled, torch.Tensor, Marked]
        travel.waits.clear()
    travel.begin()
    made = [type(scaled)(X), scaled.__class__(X)]
    assert [type(m) for m in made] == [Scaled, Scaled]


def test_a_class_that_acts_on_functions_is_waited_for_in_the_step() -> None:
    p = parameter(kind=Guarding)
    travel = Travel([p])
    travel.begin()
    assert type(p) is Guarding
    travel.pending.wait_for_exposed()
    assert travel.waits == [0]


# Who updates, and who reads meanwhile.


def test_who_updates_uses_what_is_pending() -> None:
    p = parameter()
    p.requires_grad_()
    travel = Travel([p])
    travel.begin()
    gradient = torch.ones(2, 2)
    own = p.grad = torch.zeros(2, 2)
    with travel.pending.updating(), torch.no_grad():
        travel.pending.gradients = {id(p): gradient}
        assert p.grad is gradient
        assert torch.Tensor.grad.__get__(p) is gradient
        assert isinstance(p, nn.Parameter)
        assert p.__class__ is nn.Parameter
        assert p.sum() == 4 * OLD
        assert (1 - p).sum() == 4 * (1 - OLD)
        assert p.__dict__ == {}
        assert p.shape == (2, 2)
        assert repr(p).startswith("Parameter")
        for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            torch.optim.AdamW([p], lr=0.5, weight_decay=0.0, **options).step()  # type: ignore[arg-type]
        assert torch.allclose(p.detach() * 1, torch.tensor(OLD - 1.5))
        torch.optim.SGD([p], lr=1.0).step()
        p.grad = None
        assert p.grad is None
        travel.pending.wait(0)
        travel.pending.wait_all()
        travel.pending.gradients = {}
        assert p.grad is own
    assert not travel.waits
    assert travel.pending
    assert torch.allclose(p.detach(), torch.tensor(NEW))


def test_readers_wait_while_another_thread_updates() -> None:
    p = parameter()
    travel = Travel([p])
    seen: list[list[float]] = []
    reader = threading.Thread(target=lambda: seen.append(p.flatten().tolist()))
    with travel.pending.updating():
        travel.begin()
        reader.start()
        reader.join(0.1)
        assert not travel.waits
        assert not seen
        assert type(p) is not nn.Parameter
    reader.join(PATIENCE_S)
    assert seen == [[NEW] * 4]


def test_many_readers_of_one_parameter() -> None:
    params = [parameter() for _ in range(4)]
    travel = Travel(params)
    completed: list[int] = []
    travel.completing = lambda: (completed.append(1), time.sleep(0.01))
    travel.hold.clear()
    travel.begin()
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda k=k: found.append(params[k % 4].detach().clone()))  # type: ignore[misc]
        for k in range(12)
    ]
    for thread in threads:
        thread.start()
    assert not found
    travel.hold.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 12
    assert all((f == NEW).all() for f in found)
    assert len(completed) <= 4
    assert [type(p) for p in params] == [nn.Parameter] * 4


def test_a_reader_that_is_late_waits_for_the_next_step() -> None:
    """It has waited for one arrival; before it puts the class back, the next step has begun."""
    p = parameter()
    travel = Travel([p])
    travel.hold.clear()
    travel.begin()
    seen: list[float] = []
    reader = threading.Thread(target=lambda: seen.append(p.sum().item()))
    reader.start()
    while not travel.waits:
        time.sleep(1e-3)
    with travel.pending.updating():
        travel.hold.set()  # the reader goes on, and finds the lock taken
        time.sleep(0.05)
        travel.pending._put_back([0])
        with torch.no_grad():
            p.fill_(OLD)
        travel.hold.clear()
        travel.begin()
    reader.join(0.1)
    assert not seen
    travel.hold.set()
    reader.join(PATIENCE_S)
    assert seen == [4 * NEW]
    assert len(travel.waits) == 2


def test_a_failure_is_raised_by_every_read_until_the_end() -> None:
    p = parameter()
    travel = Travel([p])
    travel.failure = RuntimeError("rank 1 left")
    travel.begin()
    readers: list[Callable[[], object]] = [
        lambda: p + 1,
        lambda: repr(p),
        lambda: p.data,
        lambda: isinstance(p, torch.Tensor),
        lambda: Untouched.apply(X, p),
    ]
    for read in readers:
        with pytest.raises(RuntimeError, match="rank 1 left"):
            read()
    travel.pending.release()
    assert p.sum() == 4 * OLD
    assert not pending_parameters.unfinished


def test_a_failed_update_is_told_once() -> None:
    p = parameter()
    travel = Travel([p])

    def fail() -> None:
        raise ValueError("no step")

    travel.completing = fail
    travel.begin()
    with pytest.raises(ValueError, match="no step"):
        p.sum()
    assert p.sum() == 4 * OLD


# What no class can see.


@pytest.mark.parametrize(
    "keep",
    [
        lambda p: p.detach(),
        lambda p: p.data,
        lambda p: p.view(-1),
        lambda p: p[0],
        lambda p: p.t(),
        lambda p: p.detach().numpy(),
        lambda p: torch.from_dlpack(p.detach()),
        lambda p: nn.Parameter(p.detach()),
        lambda p: (p * p).sum(),  # a loss that has not been differentiated
        lambda p: torch.jit.script(module(p)),
        lambda p: torch.jit.trace(module(p), X),  # type: ignore[no-untyped-call]
        lambda p: p.share_memory_(),
        lambda p: [other := torch.full((2, 2), OLD), setattr(p, "data", other)],
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_memory_that_the_program_keeps_is_waited_for_in_the_step(keep: Any) -> None:
    p, other = parameter(), parameter()
    travel = Travel([p, other])
    step(travel)
    assert not travel.waits, "nobody but us knows the memory"
    kept = keep(p)
    travel.begin()
    travel.pending.wait_for_exposed()
    assert travel.waits == [0]
    assert type(p) is nn.Parameter
    if kept is not p:
        travel.pending.wait_all()
        travel.waits.clear()
        del kept
        gc.collect()
        step(travel)
        assert not travel.waits, "it has been let go"


def step(travel: Travel) -> None:
    """A loss that is kept, as in most loops, and what comes behind it."""
    loss = sum((p * p).sum() for p in travel.params)
    assert isinstance(loss, torch.Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    travel.begin()
    travel.pending.wait_for_exposed()
    waits = list(travel.waits)
    travel.pending.wait_all()
    travel.waits[:] = waits


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_module_where_no_graph_is_alive() -> None:
    """Its use of a parameter looks like that of a graph."""
    p, other = parameter(), parameter()
    travel = Travel([p, other])
    step(travel)
    assert not travel.waits
    kept = torch.jit.trace(module(p), X)  # type: ignore[no-untyped-call]
    for _ in range(2):
        travel.begin()
        travel.pending.wait_for_exposed()
        assert travel.waits == [0]
        travel.pending.wait_all()
        travel.waits.clear()
    del kept
    step(travel)
    assert not travel.waits


def test_data_of_another_shape() -> None:
    """What PyTorch allows where no graph is alive."""
    p = parameter()
    travel = Travel([p])
    step(travel)
    p.grad = None
    p.data = torch.full((5,), OLD)
    p.sum().backward()
    assert p.grad.shape == (5,)
    step(travel)
    assert not travel.waits


def test_parameters_that_share_memory() -> None:
    whole = torch.full((3, 2), OLD)
    parts = [nn.Parameter(part) for part in whole.unbind()]
    alone = parameter()
    twice = [nn.Parameter(alone.detach()), alone]
    travel = Travel([*parts, parameter(), *twice])
    del whole
    travel.begin()
    travel.pending.wait_for_exposed()
    assert travel.waits == [0, 1, 2, 4, 5]


def test_views_of_the_optimizer_do_not_count() -> None:
    params = [parameter(), parameter()]
    views = {0: params[0].detach().view(-1)[:1], 1: params[1].detach()}
    travel = Travel(params)
    travel.begin(views=views)
    travel.pending.wait_for_exposed()
    assert not travel.waits
    travel.pending.wait_all()
    travel.waits.clear()
    del views[1]
    travel.begin(views=views)
    travel.pending.wait_for_exposed()
    assert not travel.waits


def test_memory_is_not_kept_alive() -> None:
    p = parameter()
    travel = Travel([p])
    step(travel)
    gone = torch.multiprocessing.reductions.StorageWeakRef(p.untyped_storage())  # type: ignore[no-untyped-call]
    p.data = X.clone()
    assert gone.expired()  # type: ignore[no-untyped-call]
    travel.begin()
    travel.pending.wait_for_exposed()
    assert not travel.waits


def test_a_graph_made_before_the_step_hears_that_parameters_have_changed() -> None:
    for index, expected in ((0, True), (1, False)):
        params = [parameter(), parameter()]
        travel = Travel(params)
        loss = params[index].square().sum()
        with travel.pending.updating():
            addresses = [p.data_ptr() for p in params]
            travel.pending.begin([0, 1], groups=[[0, 1]], changed=[0], addresses=addresses)
        if expected:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
        travel.pending.wait_all()
        params[index].square().sum().backward()


# Compiled and exported code.


@pytest.fixture
def graphs() -> Any:
    """A backend that counts the graphs that it gets."""
    torch._dynamo.reset()
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    yield seen, backend
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", ["module", "function", "argument", "list"])
def test_compiled_code(graphs: Any, how: str, late: bool) -> None:
    """It is compiled once where it is known before anything travels, and twice at most."""
    seen, backend = graphs
    net = nn.Sequential(module(parameter()), nn.Tanh(), module(parameter()))
    eager = module(parameter())
    params = [net[0].weight, net[2].weight, eager.weight]
    travel = Travel(params)
    fast = {
        "module": torch.compile(net, backend=backend, fullgraph=True),
        "function": torch.compile(lambda x: net(x), backend=backend, fullgraph=True),
        "argument": lambda x: argument(x, params[0], params[1]),
        "list": torch.compile(
            lambda x: torch.tanh(x @ params[0].t()) @ params[1].t(), backend=backend
        ),
    }[how]
    argument = torch.compile(
        lambda x, one, other: torch.tanh(x @ one.t()) @ other.t(), backend=backend, fullgraph=True
    )
    if not late:
        assert torch.equal(fast(X), net(X))
    for number in range(5):
        with torch.no_grad():
            for p in params:
                p.fill_(OLD)
        travel.waits.clear()
        travel.begin()
        travel.pending.wait_for_exposed()
        if number or not late:
            assert travel.waits == [0, 1], "what is eager need not be waited for"
        result = fast(X)
        assert [p.__class__ is nn.Parameter for p in params[:2]] == [True] * 2
        assert torch.equal(result, net(X))
        assert torch.equal(eager(X), X @ torch.full((2, 2), NEW))
    assert len(seen) == 1


def test_compiled_code_that_leaves_no_mark(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits whenever something is compiled is taken for what it reads."""
    _, backend = graphs
    monkeypatch.setattr(pending_parameters, "_COMPILED", "no_such_mark")
    params = [parameter(), parameter()]
    travel = Travel(params)
    fast = torch.compile(lambda x: x @ params[0], backend=backend)
    for number in range(5):
        with torch.no_grad():
            params[0].fill_(OLD)
        travel.waits.clear()
        travel.begin()
        travel.pending.wait_for_exposed()
        assert bool(travel.waits) == (number > 1)
        assert torch.equal(fast(X), X @ torch.full((2, 2), NEW))
        travel.pending.wait_all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_export_and_trace() -> None:
    for make in (
        lambda net: torch.export.export(net, (X,)).module(),
        lambda net: torch.export.export(net, (X,), strict=True).module(),
        lambda net: torch.jit.trace(net, X),  # type: ignore[no-untyped-call]
        lambda net: torch.jit.script(net),
        lambda net: torch.fx.symbolic_trace(net),
    ):
        net = module(parameter())
        travel = Travel([net.weight])
        travel.begin()
        made = make(net)
        assert torch.equal(made(X), X @ torch.full((2, 2), NEW))
        assert type(net.weight) is nn.Parameter


# Modules.


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(2, 2, num_layers=2),
        lambda: nn.MultiheadAttention(2, 1),
        lambda: nn.TransformerEncoderLayer(2, 1, 4).eval(),
        lambda: nn.Embedding(4, 2),
        lambda: nn.LayerNorm(2),
        lambda: nn.BatchNorm1d(2).eval(),
        lambda: nn.Conv1d(2, 2, 1),
        lambda: nn.PReLU(),
        lambda: nn.Bilinear(2, 2, 2),
        lambda: nn.ParameterList([torch.ones(2)]),
        lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
        lambda: nn.utils.spectral_norm(nn.Linear(2, 2)).eval(),
    ],
)
def test_modules(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    net = make()
    torch.manual_seed(3)
    plain = make()
    with torch.no_grad():
        for p in plain.parameters():
            p.fill_(NEW)
    travel = Travel(list(net.parameters()))
    travel.begin()
    for number in range(2):
        found, wanted = (_output(m) for m in (net, plain))
        assert torch.equal(found, wanted), number
    assert not travel.pending


def _output(net: nn.Module) -> torch.Tensor:
    if isinstance(net, nn.ParameterList):
        return net[0] + 1  # type: ignore[no-any-return]
    if isinstance(net, nn.Embedding):
        return net(torch.tensor([1, 2]))  # type: ignore[no-any-return]
    x = torch.ones(3, 2, 1) if isinstance(net, nn.Conv1d) else torch.ones(3, 2)
    if isinstance(net, nn.LSTM | nn.MultiheadAttention):
        return net(*[x] * (3 if isinstance(net, nn.MultiheadAttention) else 1))[0]  # type: ignore[no-any-return]
    return net(*[x] * (2 if isinstance(net, nn.Bilinear) else 1))  # type: ignore[no-any-return]


def test_modules_that_are_rebuilt() -> None:
    def replaced(net: nn.Linear) -> None:
        weight = net.weight
        del net.weight
        net.weight = weight

    def converted(net: nn.Linear) -> None:
        net.to(torch.float64)
        net.to(torch.float32)

    def reparametrized(net: nn.Linear) -> None:
        parametrize.register_parametrization(net, "weight", Product(), unsafe=True)
        parametrize.remove_parametrizations(net, "weight", leave_parametrized=False)

    def substituted(net: nn.Linear) -> None:
        with stateless._reparametrize_module(net, {"weight": torch.zeros(2, 2)}):
            assert not net(X).any()

    changes: list[Callable[[nn.Linear], object]] = [
        replaced,
        converted,
        reparametrized,
        substituted,
        lambda net: net.load_state_dict(copy.deepcopy(net).state_dict()),
        lambda net: setattr(nn.Linear(2, 2, False), "weight", net.weight),
        lambda net: net.requires_grad_(False),
        lambda net: net.share_memory(),
    ]
    for change in changes:
        net = module(parameter())
        travel = Travel([net.weight])
        travel.begin()
        change(net)
        assert torch.equal(net(X), X @ torch.full((2, 2), NEW))
        assert isinstance(net.weight, nn.Parameter)
        assert type(net.weight) is nn.Parameter


# Life and death.


def test_no_stand_in_is_saved_or_sent() -> None:
    p = parameter()
    travel = Travel([p])
    file = io.BytesIO()
    travel.begin()
    torch.save({"weights": [p]}, file)
    assert b"wfbp" not in file.getvalue()
    travel.begin()
    assert b"wfbp" not in pickle.dumps(p)
    context = multiprocessing.get_context("spawn")
    travel.begin()
    queue = context.SimpleQueue()
    queue.put(p)
    received = queue.get()
    assert type(received) is nn.Parameter
    assert (received == NEW).all()
    assert p.is_shared()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
# Of JAX, where another test has loaded it.
@pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*_at_fork:pytest.PytestUnraisableExceptionWarning")
def test_a_process_is_forked_when_everything_has_arrived() -> None:
    p = parameter()
    travel = Travel([p])
    travel.begin()
    child = os.fork()
    if not child:
        right = type(p) is nn.Parameter and ctypes.c_float.from_address(p.data_ptr()).value == NEW
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert travel.waits == [0]


def test_another_one_takes_over() -> None:
    p = parameter()
    first = Travel([p])
    first.begin()
    first.pending.wait_all()
    second = Travel([p])
    del first
    gc.collect()
    second.begin()
    assert p.sum() == 4 * NEW
    assert second.waits == [0]


def test_it_lives_until_all_has_arrived_and_no_longer() -> None:
    p = parameter()
    travel = Travel([p])
    pending = weakref.ref(travel.pending)
    travel.begin()
    del travel
    gc.collect()
    assert pending() is not None
    assert p.sum() == 4 * NEW
    gc.collect()
    assert pending() is None
    assert id(p) not in pending_parameters._owners


def test_warnings_of_ours() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = parameter()
        Travel([p]).begin()
        assert p.sum() == 4 * NEW
