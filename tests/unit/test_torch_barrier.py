"""The read barrier: every way to get at a parameter is heard of, and nothing else changes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, stateless

from wfbp.torch.guarded import Guarded
from wfbp.torch.reading import Barrier

MADE: list[Barrier] = []


@pytest.fixture(autouse=True)
def no_traces() -> Iterator[None]:
    """Barriers that a test has made are released, and leave no hooks."""
    yield
    while MADE:
        MADE.pop().release()
    gc.collect()
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_parameter_registration_hooks


def guarded(root: nn.Module, active: bool = True) -> tuple[Barrier, list[int]]:
    """A barrier over all of a module's parameters, and the reads that it hears of."""
    reads: list[int] = []
    barrier = Barrier(list(root.parameters()), reads.append)
    MADE.append(barrier)
    barrier.guard(root)
    barrier.active = active
    return barrier, reads


def dictionaries(root: nn.Module) -> set[type]:
    return {type(m.__dict__["_parameters"]) for m in root.modules()}


def two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2, bias=False)))


READERS: list[Callable[[nn.Linear], Any]] = [
    lambda m: m.weight,
    lambda m: m.get_parameter("weight"),
    lambda m: m._parameters["weight"],
    lambda m: m._parameters.get("weight"),
    lambda m: m._parameters.setdefault("weight", None),
    lambda m: m._parameters.pop("weight"),
    lambda m: [m._parameters.popitem(), m._parameters.popitem()],
    lambda m: m._parameters.items(),
    lambda m: m._parameters.values(),
    lambda m: m._parameters.copy(),
    lambda m: dict(m._parameters),
    lambda m: {**m._parameters},
    lambda m: m._parameters | {},
    lambda m: {} | m._parameters,
    lambda m: list(m.parameters()),
    lambda m: m.state_dict(),
    lambda m: m.load_state_dict(m.state_dict()),
    lambda m: m.to(torch.float64),
    lambda m: m(torch.ones(1, 3)),
    lambda m: copy.deepcopy(m),
    lambda m: pickle.dumps(m),
    lambda m: torch.save(m, io.BytesIO()),
    lambda m: nn.utils.parameters_to_vector(m.parameters()),
    lambda m: torch.func.functional_call(m, {"bias": torch.ones(3)}, (torch.ones(1, 3),)),
]


@pytest.mark.parametrize("reader", READERS)
def test_every_read_is_heard_before_the_value_is_out(reader: Callable[[nn.Linear], Any]) -> None:
    module = nn.Linear(3, 3)
    barrier, reads = guarded(module, active=False)
    reader(copy.deepcopy(module))
    assert not reads
    assert not barrier.seen
    barrier.watch()
    reader(module)
    assert 0 in reads
    assert 0 in barrier.seen


def test_only_what_is_read_is_heard_of() -> None:
    barrier, reads = guarded(model := two())
    assert model[0].bias is not None
    assert "weight" in model[0]._parameters
    assert list(model[0]._parameters) == ["weight", "bias"]
    assert len(model[0]._parameters) == 2
    assert model[0].in_features == 3
    model.train()
    model.requires_grad_  # noqa: B018
    assert reads == [1]
    assert barrier.seen == {1}
    model[1](torch.ones(3))
    assert reads == [1, 2]
    barrier.watch()
    assert not barrier.seen


def test_the_callback_comes_first() -> None:
    module = nn.Linear(1, 1, bias=False)

    def fill(index: int) -> None:
        with torch.no_grad():
            weight.fill_(7.0)

    weight = module.weight
    barrier = Barrier([weight], fill)
    barrier.guard(module)
    barrier.active = True
    assert module(torch.ones(1)).item() == 7.0


def test_an_error_in_the_callback_reaches_the_reader() -> None:
    module = nn.Linear(1, 1)

    def fail(index: int) -> None:
        raise RuntimeError("lost")

    barrier = Barrier(list(module.parameters()), fail)
    barrier.guard(module)
    barrier.active = True
    with pytest.raises(RuntimeError, match="lost"):
        module(torch.ones(1))


def test_only_modules_that_hold_parameters_are_touched() -> None:
    model = two()
    barrier = Barrier([model[0].bias], lambda index: None)
    barrier.guard(model)
    barrier.guard(model)
    assert isinstance(model[0]._parameters, Guarded)
    assert model[0]._parameters.barriers == (barrier,)
    assert type(model._parameters) is dict
    assert type(model[1][1]._parameters) is dict
    assert not barrier.exposed
    barrier.release()
    assert dictionaries(model) == {dict}
    assert barrier.exposed == {0}


def test_barriers_compose() -> None:
    model = nn.Linear(2, 2)
    heard: list[str] = []
    barriers = [
        Barrier([model.weight], lambda index: heard.append("weight")),
        Barrier([model.bias], lambda index: heard.append("bias")),
    ]
    for barrier in barriers:
        barrier.guard(model)
        barrier.active = True
    model(torch.ones(2))
    assert sorted(heard) == ["bias", "weight"]
    barriers[0].release()
    model(torch.ones(2))
    assert sorted(heard) == ["bias", "bias", "weight"]
    assert isinstance(model._parameters, Guarded)
    barriers[1].release()
    assert dictionaries(model) == {dict}


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: pickle.loads(pickle.dumps(m, protocol=2)),
    ],
)
@pytest.mark.parametrize("make", [two, lambda: nn.LSTM(2, 2)])
def test_copies_are_plain(
    make: Callable[[], nn.Module], duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    model = make()
    barrier, reads = guarded(model, active=False)
    for module in model.modules():
        if isinstance(module._parameters, Guarded):
            barrier.hook(module)
    other = duplicate(model)
    assert dictionaries(other) == {dict}
    assert not any(m._forward_pre_hooks for m in other.modules())
    barrier.active = True
    copied = list(other.parameters())
    assert not reads
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), copied, strict=True))
    assert all(p is not q for p, q in zip(model.parameters(), copied, strict=True))


def test_a_saved_model_loads_without_us() -> None:
    guarded(model := two())
    file = io.BytesIO()
    torch.save(model, file)
    assert b"wfbp" not in file.getvalue()
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)[0].weight, model[0].weight)


def test_loading_waits_and_keeps_the_parameters() -> None:
    model = two()
    barrier, reads = guarded(model)
    model.load_state_dict({k: torch.ones_like(v) for k, v in two().state_dict().items()})
    assert set(reads) == {0, 1, 2}
    assert torch.equal(model[0].weight, torch.ones(3, 3))
    assert not barrier.moved


def test_tied_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    barrier, reads = guarded(model)
    model[1](torch.ones(3))
    assert reads == [0, 2]
    assert barrier.seen == {0, 2}
    del reads[:]
    model[1].bias = model[0].bias
    assert barrier.moved
    barrier.guard(model)
    assert not barrier.moved
    assert barrier.exposed == {2}
    del reads[:]
    model[1](torch.ones(3))
    assert reads == [0, 1]


def test_parameters_come_and_go() -> None:
    module = nn.Linear(2, 2)
    weight = module.weight
    barrier, reads = guarded(module)
    module.register_parameter("extra", nn.Parameter(torch.ones(1)))
    assert module.extra.item() == 1.0
    assert not reads
    assert not barrier.moved
    del module.weight
    assert barrier.moved
    assert [n for n, _ in module.named_parameters()] == ["bias", "extra"]
    module.weight = weight
    barrier.guard(module)
    assert not barrier.exposed
    del reads[:]
    assert module.weight is weight
    assert reads == [0]


def test_conversion_to_new_parameters_is_noticed() -> None:
    module = nn.Linear(2, 2)
    barrier, _ = guarded(module)
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        module.to(torch.float64)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
    assert barrier.moved
    barrier.guard(module)
    assert barrier.exposed == {0, 1}


def test_parametrization() -> None:
    module = nn.Linear(3, 3)
    barrier, reads = guarded(module)

    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    parametrize.register_parametrization(module, "weight", Double())
    assert barrier.moved
    barrier.guard(module)
    assert not barrier.exposed
    barrier.watch()
    del reads[:]
    module(torch.ones(3))
    assert barrier.seen == {0, 1}
    parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
    barrier.guard(module)
    assert not barrier.exposed


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "norm", [parametrizations.weight_norm, nn.utils.weight_norm, nn.utils.spectral_norm]
)
def test_norms_of_weights(norm: Callable[[nn.Module], nn.Module]) -> None:
    module = norm(nn.Linear(3, 3))
    expected = module(torch.ones(3)) if norm is not nn.utils.spectral_norm else None
    barrier, _ = guarded(module)
    assert not barrier.exposed
    assert expected is None or torch.equal(module(torch.ones(3)), expected)
    module(torch.ones(3))
    assert barrier.seen == set(range(len(list(module.parameters()))))


def test_functional_call_leaves_everything_in_place() -> None:
    model = two()
    barrier, reads = guarded(model)
    weight = model[0].weight
    del reads[:]
    stand_in = {"0.weight": torch.zeros(3, 3)}
    result = torch.func.functional_call(model, stand_in, (torch.ones(3),))
    assert {1, 2} <= set(reads)
    assert result.shape == (2,)
    assert model[0].weight is weight
    barrier.guard(model)
    assert not barrier.exposed
    with stateless._reparametrize_module(model, stand_in):
        assert model[0].weight is stand_in["0.weight"]


@pytest.mark.parametrize("training", [True, False])
def test_attention_reads_a_module_that_it_does_not_call(training: bool) -> None:
    module = nn.MultiheadAttention(4, 2, batch_first=True).train(training)
    barrier, _ = guarded(module)
    x = torch.ones(1, 2, 4)
    module(x, x, x)
    assert barrier.seen == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_keep_a_list(kind: Callable[..., nn.Module]) -> None:
    module = kind(2, 2, num_layers=2)
    barrier, reads = guarded(module)
    module(torch.ones(1, 1, 2))
    assert set(reads) == set(range(8))
    barrier.release()
    del reads[:]
    barrier.active = True
    module(torch.ones(1, 1, 2))
    assert not reads


def test_a_model_and_its_barrier_die_together() -> None:
    model = nn.LSTM(1, 1)
    barrier, _ = guarded(model)
    MADE.clear()
    dead = weakref.ref(model), weakref.ref(barrier)
    del model, barrier
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


class Hidden(nn.Module):
    """Reads its parameter where nobody hears it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.fetch = {"weight": [self.weight]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.fetch["weight"][0]


def test_hooks_for_what_was_not_seen() -> None:
    model = nn.Sequential(nn.Linear(1, 1), Hidden(), Hidden())
    barrier, reads = guarded(model)
    barrier.watch()
    first = nn.Sequential(model[0], model[1])
    first(torch.ones(1))
    assert barrier.seen == {0, 1}
    barrier.hook_unseen()
    barrier.watch()
    first(torch.ones(1))
    assert barrier.seen == {0, 1, 2}
    barrier.active = False
    del reads[:]
    model(torch.ones(1))
    assert not reads


class Elsewhere(nn.Module):
    """Uses a parameter that another module holds."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.borrowed = (owner.weight,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.borrowed[0]


def test_a_list_of_anothers_parameters() -> None:
    owner = nn.Linear(2, 2)
    model = nn.ModuleList([owner, Elsewhere(owner)])
    _, reads = guarded(model)
    model[1](torch.ones(2))
    assert reads == [0]


def test_lists_and_dictionaries_of_parameters() -> None:
    model = nn.ModuleDict(
        {
            "list": nn.ParameterList([torch.ones(1), torch.ones(1)]),
            "dict": nn.ParameterDict({"a": torch.ones(1)}),
        }
    )
    barrier, reads = guarded(model)
    assert not barrier.exposed
    names = [n for n, _ in model.named_parameters()]
    del reads[:]
    assert model["list"][1].item() == 1.0
    assert reads == [names.index("list.1")]
    assert model["dict"]["a"].item() == 1.0
    assert reads == [names.index("list.1"), names.index("dict.a")]


def test_any_thread_may_read() -> None:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(20))
    _, reads = guarded(model)

    def read() -> None:
        for _ in range(50):
            for module in model:
                module(torch.ones(1))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(reads.count(k) == 200 for k in range(40))


def test_backward_and_a_step_see_the_same_parameters() -> None:
    model, plain = two(), two()
    plain.load_state_dict(model.state_dict())
    guarded(model)
    for module in (model, plain):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


# Compiled code.


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
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_modules_are_exposed(graphs: Any, in_place: bool) -> None:
    seen, backend = graphs
    model = nn.Sequential(nn.Linear(3, 3), two())
    barrier, reads = guarded(model)
    assert not barrier.exposed
    if in_place:
        model[1].compile(backend=backend)
    else:
        model[1] = torch.compile(model[1], backend=backend)
    barrier.guard(model)
    assert barrier.exposed == {2, 3, 4}
    assert dictionaries(model[1]) == {dict}
    del reads[:]
    for active in (True, False, True):
        barrier.active = active
        model(torch.ones(2, 3))
    assert len(seen) == (not in_place)  # torch does not compile a Sequential in place
    assert set(reads) == {0, 1}


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiled_function_leaves_its_graph_to_read(graphs: Any) -> None:
    seen, backend = graphs
    graphs_after: list[int] = []
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    barrier, reads = guarded(model)
    fast = torch.compile(lambda x: model(x) + 1, backend=backend)
    for step in range(4):
        for active in (True, False):
            with torch.no_grad():
                model[0].weight.fill_(float(step))
            barrier.active = active
            del reads[:]
            result = fast(torch.ones(2, 3))
            graphs_after.append(len(seen))
            assert set(reads) == ({0, 1} if active else set())
            barrier.active = False
            assert torch.equal(result, model(torch.ones(2, 3)) + 1)
    assert graphs_after[2:] == [graphs_after[1]] * 6  # nothing is compiled at every step


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_exposed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)))
    barrier, reads = guarded(model)
    assert barrier.exposed == {2, 3}
    model(torch.ones(3))
    assert set(reads) == {0, 1}


def test_a_traced_copy_is_remembered() -> None:
    """It reads unheard, though the module that it was made of is guarded."""
    module, other = nn.Linear(3, 2), nn.Linear(2, 2)
    barrier = Barrier([*module.parameters(), *other.parameters()], lambda index: None)
    MADE.append(barrier)
    barrier.guard(module)
    barrier.guard(other)
    assert not barrier.exposed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, torch.ones(1, 3))  # type: ignore[no-untyped-call]
    assert barrier.exposed == {0, 1}
    barrier.guard(other)
    assert barrier.exposed == {0, 1}
    assert torch.equal(traced(torch.ones(1, 3)), module(torch.ones(1, 3)))


def test_a_scripted_copy_that_is_guarded_is_remembered() -> None:
    module = nn.Linear(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(module)
    barrier, _ = guarded(module)
    barrier.guard(scripted)
    barrier.guard(module)
    assert barrier.exposed == {0, 1}


def test_a_module_that_is_given_a_parameter_later() -> None:
    module, later = nn.Linear(3, 3), nn.Linear(3, 3)
    barrier, reads = guarded(module)
    later.weight = module.weight
    assert not reads[1:]
    del reads[:]
    assert later.weight is module.weight
    assert reads == [0, 0]
    barrier.release()
    assert dictionaries(later) == {dict}


def test_modules_are_not_kept_alive() -> None:
    module = nn.Linear(3, 3)
    barrier, _ = guarded(module)
    later = nn.Linear(3, 3)
    later.weight = module.weight
    barrier.hook(later)
    seen = weakref.ref(later)
    del later
    gc.collect()
    assert seen() is None
    barrier.hook_unseen()
    barrier.release()
