"""Python sources as the re-layout sees them: modules, scopes, and edits by position."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOTS = ("wfbp", "tests", "examples", "launch")


class Scope:
    """Names bound in a module, class, function or comprehension."""

    def __init__(self, kind: str, node: ast.AST, parent: Scope | None) -> None:
        self.kind = kind  # module, class, function, comprehension
        self.node = node
        self.parent = parent
        self.bound: dict[str, list[ast.AST]] = {}
        self.globals: set[str] = set()
        self.nonlocals: set[str] = set()

    def bind(self, name: str, node: ast.AST) -> None:
        if name in self.globals:
            scope = self
            while scope.parent is not None:
                scope = scope.parent
            scope.bound.setdefault(name, []).append(node)
        elif name in self.nonlocals and self.parent is not None:
            scope = self.parent
            while scope.parent is not None and (scope.kind == "class" or name not in scope.bound):
                scope = scope.parent
            scope.bound.setdefault(name, []).append(node)
        else:
            self.bound.setdefault(name, []).append(node)

    def lookup(self, name: str) -> Scope | None:
        scope: Scope | None = self
        first = True
        while scope is not None:
            if (scope.kind != "class" or first) and name in scope.bound:
                if not (scope.kind == "function" and name in scope.globals):
                    return scope
            if scope.kind != "comprehension":
                first = False
            scope = scope.parent
        return None

    def between(self, name: str, end: Scope) -> bool:
        """Whether a scope from here up to (not including) ``end`` binds the name."""
        scope: Scope | None = self
        first = True
        while scope is not None and scope is not end:
            if (scope.kind != "class" or first) and name in scope.bound:
                return True
            if scope.kind != "comprehension":
                first = False
            scope = scope.parent
        return False


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Import:
    node: ast.stmt
    scope: Scope


@dataclass
class Module:
    """One file; ``name`` is its dotted name."""

    path: Path  # relative to the checkout
    name: str
    text: str
    tree: ast.Module = field(init=False)
    top: Scope = field(init=False)
    names: list[tuple[ast.Name, Scope]] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    nodes: list[tuple[ast.AST, Scope]] = field(default_factory=list)
    declared: list[tuple[ast.Global | ast.Nonlocal, Scope]] = field(default_factory=list)
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    string_annotations: list[tuple[ast.Constant, Scope]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.data = self.text.encode()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.tree = ast.parse(self.text, str(self.path))
        self.top = Scope("module", self.tree, None)
        self._pending: list[tuple[Scope, Any]] = []
        self._walk(self.tree.body, self.top)

    # --- positions
    def at(self, line: int, col: int) -> int:
        return self.starts[line - 1] + col

    def span(self, node: Any) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def edit(self, start: int, end: int, new: str) -> None:
        self.edits.append((start, end, new))

    def replace_word(self, start: int, old: str, new: str) -> bool:
        raw = old.encode()
        if self.data[start : start + len(raw)] != raw:
            return False
        self.edit(start, start + len(raw), new)
        return True

    def result(self) -> str:
        edits = sorted(set(self.edits))
        out, last = [], 0
        for start, end, new in edits:
            if start < last:
                raise ValueError(
                    f"{self.path}: edits overlap at {self.data[start - 40 : end + 20]!r} -> {new!r}"
                )
            out.append(self.data[last:start])
            out.append(new.encode())
            last = end
        out.append(self.data[last:])
        return b"".join(out).decode()

    # --- scopes
    def _walk(self, body: Any, scope: Scope) -> None:
        # bindings first, so that references see later ones
        for node in body if isinstance(body, list) else [body]:
            self._bind(node, scope)
        for node in body if isinstance(body, list) else [body]:
            self._visit(node, scope)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        """Bindings of a statement or expression in its own scope, not of inner ones."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope.bind(node.name, node)
            for part in [*node.decorator_list, *getattr(node, "bases", [])]:
                self._bind(part, scope)
            return
        if isinstance(node, ast.Lambda) or isinstance(node, COMPREHENSIONS):
            for inner in ast.walk(node):
                if isinstance(inner, ast.NamedExpr):
                    target = scope
                    while target.kind == "comprehension" and target.parent is not None:
                        target = target.parent
                    target.bind(inner.target.id, inner.target)
            return
        if isinstance(node, ast.Global):
            scope.globals |= set(node.names)
            self.declared.append((node, scope))
        elif isinstance(node, ast.Nonlocal):
            scope.nonlocals |= set(node.names)
            self.declared.append((node, scope))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                name = alias.asname or (
                    alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name
                )
                scope.bind(name, node)
            self.imports.append(Import(node, scope))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            scope.bind(node.id, node)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            scope.bind(node.name, node)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            scope.bind(node.name, node)
        for child in ast.iter_child_nodes(node):
            self._bind(child, scope)

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        self.nodes.append((node, scope))
        if isinstance(node, FUNCTIONS):
            inner = Scope("function", node, scope)
            arguments = node.args
            for arg in [
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
                *filter(None, [arguments.vararg, arguments.kwarg]),
            ]:
                inner.bind(arg.arg, arg)
                if arg.annotation is not None:
                    self._visit(arg.annotation, scope)
            for default in [*arguments.defaults, *arguments.kw_defaults]:
                if default is not None:
                    self._visit(default, scope)
            if not isinstance(node, ast.Lambda):
                for decorator in node.decorator_list:
                    self._visit(decorator, scope)
                if node.returns is not None:
                    self._visit(node.returns, scope)
            node._scope = inner  # type: ignore[union-attr]
            self._walk(node.body, inner)
            return
        if isinstance(node, ast.ClassDef):
            for part in [*node.decorator_list, *node.bases, *[k.value for k in node.keywords]]:
                self._visit(part, scope)
            inner = Scope("class", node, scope)
            node._scope = inner  # type: ignore[attr-defined]
            self._walk(node.body, inner)
            return
        if isinstance(node, COMPREHENSIONS):
            first = node.generators[0]
            self._visit(first.iter, scope)
            inner = Scope("comprehension", node, scope)
            for generator in node.generators:
                self._bind(generator.target, inner)
            for generator in node.generators:
                self._visit(generator.target, inner)
                if generator is not first:
                    self._visit(generator.iter, inner)
                for condition in generator.ifs:
                    self._visit(condition, inner)
            for part in ["key", "value", "elt"]:
                if hasattr(node, part):
                    self._visit(getattr(node, part), inner)
            return
        if isinstance(node, ast.Name):
            self.names.append((node, scope))
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope)


def module_name(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def sources(root: Path) -> Iterator[Path]:
    for top in ROOTS:
        for path in sorted((root / top).rglob("*.py")):
            if "__pycache__" not in path.parts:
                yield path.relative_to(root)
    for name in ("setup.py",):
        if (root / name).exists():
            yield Path(name)


def load(root: Path) -> dict[str, Module]:
    return {
        module_name(path): Module(path, module_name(path), (root / path).read_text())
        for path in sources(root)
    }


WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
