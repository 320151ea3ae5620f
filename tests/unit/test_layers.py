"""The architecture, read from the sources: who may import whom, and who reads the environment."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "wfbp"

BELOW: dict[str, set[str]] = {
    "errors": set(),
    "config": {"core", "errors"},
    "core": {"errors"},
    "_native": set(),
    "native": {"_native"},
    "sim": {"core", "errors"},
    "launcher": {"errors"},
    "comm": {"config", "core", "errors", "launcher", "native"},
    "cuda": {"comm", "config", "core", "errors"},
    "runtime": {"comm", "config", "core", "errors", "launcher", "native"},
}
"""What each part may import besides itself."""

TOP: dict[str, set[str]] = {
    "torch": set(),
    "jax": set(),
    "cli": {"bench"},
    "__main__": {"cli"},
    "dispatch": {"torch", "jax"},
    "collectives": {"dispatch"},
    "horovod": {"torch"},
    "bench": {"torch"},
    "integrations": {"torch", "horovod"},
}
"""At the top: each may import all of the above, and of each other only what is stated."""

FRAMEWORKS = {
    "torch": {"torch", "horovod", "bench", "dispatch", "integrations"},
    "jax": {"jax", "dispatch"},
    "mpi4py": {"comm", "bench"},
}
"""Which parts may import these foreign packages; ``dispatch`` for signatures alone."""

FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def part_of(module: str) -> str:
    """``wfbp.core.plan`` -> ``core``; ``wfbp`` itself -> the empty name."""
    return module.partition(".")[2].partition(".")[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute names of all modules that a file imports, lazily or not, with their lines."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = ".".join([*base, *filter(None, [node.module])]) if node.level else node.module
            assert module is not None
            if module == "wfbp":  # `from wfbp import native` imports the part, if it is one
                for alias in node.names:
                    yield f"wfbp.{alias.name}", node.lineno
            else:
                yield module, node.lineno


def allowed(part: str) -> set[str] | None:
    """Parts that this one may import; None where it may import everything."""
    if part == "":
        return None  # the package's own __init__ passes names on, lazily
    if part in BELOW:
        return BELOW[part]
    return set(BELOW) | TOP[part]


def test_imports_go_downward_only_and_frameworks_stay_in_their_part() -> None:
    for path in FILES:
        part = part_of(module_of(path))
        permitted = allowed(part)
        for module, line in imports(path):
            top, target = module.partition(".")[0], part_of(module)
            if top == "wfbp" and permitted is not None and target != part:
                assert target in permitted, f"{path}:{line}: {part} must not import {module}"
            assert part in FRAMEWORKS.get(top, {part}), f"{path}:{line}: {part} uses {module}"


def test_every_part_has_a_layer() -> None:
    parts = {part_of(module_of(path)) for path in FILES} - {""}
    assert parts <= set(BELOW) | set(TOP), "say where the new part stands in the layers"


def test_the_parts_form_no_cycle() -> None:
    graphlib.TopologicalSorter(BELOW).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("part", ["core", "torch", "jax", "cli"])
def test_files_and_folders_of_a_part_form_no_cycle(part: str) -> None:
    """Also those that a file imports lazily."""
    below: dict[str, set[str]] = {}
    for path in (PACKAGE / part).rglob("*.py"):
        room = module_of(path).split(".")[2:3]
        for node in ast.walk(tree_of(path)):
            if room and isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                rooms = {name.split(".")[2] for name in names if name.startswith(f"wfbp.{part}.")}
                real = {each for each in rooms if list((PACKAGE / part).glob(f"{each}*"))}
                below.setdefault(room[0], set()).update(real - {*room})
    graphlib.TopologicalSorter(below).prepare()


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_config_reads_the_environment(path: Path) -> None:
    if module_of(path) == "wfbp.config":
        return
    for node in ast.walk(tree_of(path)):
        key: ast.expr | None = None
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Subscript) and is_environment(node.value):
            if isinstance(node.ctx, ast.Store):
                continue
            key = node.slice
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and is_environment(called.value):
                key = node.args[0] if node.args else None
            elif name_of(called) in ("os.getenv", "getenv"):
                key = node.args[0]
        if key is None:
            continue
        assert isinstance(key, ast.Constant), f"{path}:{line}: a variable without a name"
        assert not str(key.value).startswith("WFBP_"), (
            f"{path}:{line}: {key.value!r} is read here; add it to wfbp.config.Config"
        )


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_environment(node: ast.expr) -> bool:
    return name_of(node) in ("os.environ", "environ")


RUNTIME = (
    "cores",
    "signals",
    "heap",
    "step",
    "measuring",
    "arguments",
    "tuning",
    "timeline_files",
    "buffers",
    "coded_buffer",
    "progress",
    "lane",
    "runtime",
    "uncaught",
    "consistency",
    "named",
    "process",
    "collectives",
    "recorder",
    "compression_guard",
    "gathers",
    "reducer",
    "api",
)
"""The parts of ``wfbp.runtime``, lowest first: each may import those before it, and itself."""


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports, also as ``from package import module``.

    What is imported for annotations alone does not count.
    """
    known = {module_of(file) for file in FILES}
    result = set()
    tree = tree_of(path)
    blocks = [
        n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)
    ]
    for_types = {id(inner) for block in blocks for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            result |= (inner & known) or {node.module}
    return result & known - {module_of(path)}


def test_the_runtime_imports_downward_only() -> None:
    def rank_of(module: str) -> int:
        return RUNTIME.index(module.split(".")[2])

    for path in sorted((PACKAGE / "runtime").rglob("*.py")):
        module = module_of(path)
        if module == "wfbp.runtime":
            continue
        for target in imported_modules(path):
            if target.startswith("wfbp.runtime."):
                assert rank_of(target) <= rank_of(module), f"{module} must not import {target}"


def test_modules_form_no_circle() -> None:
    below = {module_of(path): imported_modules(path) for path in FILES}
    below.pop("wfbp")  # passes names on, lazily
    graphlib.TopologicalSorter(below).prepare()
