"""Moves, merges and renames by symbol; the same code carries out both passes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from source import Module, Scope, load

Symbol = tuple[str, str]


@dataclass
class Report:
    """What a person should look at; printed at the end."""

    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.lines:
            self.lines.append(text)

    def error(self, text: str) -> None:
        if text not in self.errors:
            self.errors.append(text)


class Tree:
    """All modules of a checkout, and what is bound where."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = load(root)
        self.packages = {
            ".".join(name.split(".")[:n])
            for name in self.modules
            for n in range(1, name.count(".") + 1)
        } | {n for n, m in self.modules.items() if m.path.name == "__init__.py"}

    def is_module(self, name: str) -> bool:
        return name in self.modules or name in self.packages

    def origin(self, module: str, name: str, depth: int = 0) -> Symbol | None:
        """Where a symbol of a module is defined, following imports within the tree."""
        source = self.modules.get(module)
        if source is None or depth > 8:
            return None
        bound = source.top.bound.get(name)
        if not bound:
            return None
        for node in bound:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name and self.is_module(node.module):
                        return self.origin(node.module, alias.name, depth + 1)
        return module, name


@dataclass
class Plan:
    """One pass: where modules go, what symbols and members are called."""

    modules: dict[str, str]  # old -> new; what is not in here stays
    symbols: dict[Symbol, str] = field(default_factory=dict)
    locals: dict[tuple[str, str], str] = field(default_factory=dict)  # (module.qualname, old)
    params: dict[tuple[str, str], str] = field(default_factory=dict)  # (module.qualname, old)
    member: Callable[[Any, str, Module, ast.AST], str | None] | None = None
    words: dict[str, str] = field(default_factory=dict)  # of parameters and local variables
    not_words: set[tuple[str, str]] = field(default_factory=set)
    word_scopes: dict[str, tuple[str, ...]] = field(default_factory=dict)


SELF = object()


class Relocation:
    def __init__(self, tree: Tree, plan: Plan, report: Report, analysis: Any = None) -> None:
        self.tree, self.plan, self.report, self.analysis = tree, plan, report, analysis

    def new_module(self, name: str) -> str:
        return self.plan.modules.get(name, name)

    def new_symbol(self, module: str, name: str) -> str:
        origin = self.tree.origin(module, name)
        if origin is None:
            return name
        source = self.tree.modules[module]
        for node in source.top.bound.get(name, []):  # renamed on import: keeps its name
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.asname == name and alias.asname != alias.name:
                        return name
        return self.plan.symbols.get(origin, name)

    # --- one module
    def run(self) -> None:
        for module in self.tree.modules.values():
            self._module(module)

    def _module(self, m: Module) -> None:
        here = self.new_module(m.name)
        # what each import binding is: (scope, local) -> ("module", old name) | ("symbol", M, name)
        kinds: dict[tuple[int, str], tuple[Any, ...]] = {}
        for item in m.imports:
            node = item.node
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{m.path}: relative import"
                if node.module is None or not self.tree.is_module(node.module):
                    continue
                for alias in node.names:
                    local = alias.asname or alias.name
                    full = f"{node.module}.{alias.name}"
                    owner = self._bound_scope(item.scope, local)
                    source = self.tree.modules.get(node.module)
                    defined = source is not None and alias.name in source.top.bound
                    if self.tree.is_module(full) and not defined:
                        kinds[id(owner), local] = ("module", full)
                    else:
                        kinds[id(owner), local] = ("symbol", node.module, alias.name)
            else:
                for alias in node.names:
                    if self.tree.is_module(alias.name):
                        owner = self._bound_scope(item.scope, alias.asname or "")
                        if alias.asname:
                            kinds[id(owner), alias.asname] = ("module", alias.name)
                        else:
                            top = alias.name.partition(".")[0]
                            owner = self._bound_scope(item.scope, top)
                            kinds[id(owner), top] = ("module", top)
        # references of each binding
        refs: dict[tuple[int, str], list[tuple[ast.Name, Scope]]] = defaultdict(list)
        scopes: dict[int, Scope] = {}
        for name, scope in m.names:
            owner = scope.lookup(name.id)
            if owner is not None:
                refs[id(owner), name.id].append((name, scope))
                scopes[id(owner)] = owner
        for item in m.imports:
            scopes[id(item.scope)] = item.scope
            scopes[id(m.top)] = m.top
        parents = {
            id(child): parent for parent, _ in m.nodes for child in ast.iter_child_nodes(parent)
        }
        # every attribute access on a module
        uses: dict[int, tuple[str, str]] = {}  # id(Name) -> (module, attr) for `module.attr`
        done_attributes: set[int] = set()
        # decide new local names
        new_local: dict[tuple[int, str], Any] = {}
        expand: dict[tuple[int, str], set[str]] = {}
        for key, kind in kinds.items():
            owner, local = scopes.get(key[0], m.top), key[1]
            if kind[0] == "symbol":
                new = self.new_symbol(kind[1], kind[2])
                target = new if local == kind[2] else local
                if target != local and self._conflict(m, refs.get(key, []), owner, target, kinds):
                    self.report.error(f"{m.path}: {local} -> {target} meets another {target}")
                    target = local
                new_local[key] = target
            else:
                module = kind[1]
                aliased = self._aliased(m, key, kinds, local, module)
                new = self.new_module(module)
                if new == here and module != m.name:
                    new_local[key] = SELF
                    continue
                target = local if aliased else new.rpartition(".")[2]
                if target != local and self._conflict(m, refs.get(key, []), owner, target, kinds):
                    attributes = self._attributes(refs.get(key, []), parents)
                    if attributes is not None and not self._any_conflict(
                        m, refs.get(key, []), owner, module, attributes, kinds
                    ):
                        expand[key] = attributes
                        new_local[key] = None
                        continue
                    target = f"{target}_module"
                    self.report.note(f"{m.path}: module {module} is imported as {target}")
                new_local[key] = target
        # references
        for key, names in refs.items():
            owner = scopes[key[0]]
            local = key[1]
            kind = kinds.get(key)
            for name, scope in names:
                parent = parents.get(id(name))
                if kind is not None and kind[0] == "module":
                    attribute = parent if isinstance(parent, ast.Attribute) else None
                    if attribute is not None and self._chain(m, attribute, kind[1], parents):
                        done_attributes.add(id(attribute))
                    if new_local[key] is SELF or new_local[key] is None:
                        if attribute is None:
                            self.report.error(
                                f"{m.path}:{name.lineno}: module {local} is used as a value"
                            )
                            continue
                        new = self.new_symbol(kind[1], attribute.attr)
                        start, _ = m.span(attribute)
                        m.edit(start, m.span(attribute)[1], new)
                        done_attributes.add(id(attribute))
                        if scope.between(new, owner):
                            self.report.error(
                                f"{m.path}:{name.lineno}: {local}.{attribute.attr} becomes {new}, "
                                "which is a local name there"
                            )
                        continue
                    if new_local[key] != local:
                        self._word(m, name, new_local[key])
                    if attribute is not None and id(attribute) not in done_attributes:
                        new = self.new_symbol(kind[1], attribute.attr)
                        if new != attribute.attr:
                            self._attribute(m, attribute, new)
                        done_attributes.add(id(attribute))
                elif kind is not None:
                    if new_local[key] != local:
                        self._word(m, name, new_local[key])
                elif owner.kind == "module":
                    new = self.plan.symbols.get((m.name, local), local)
                    if new != local:
                        if scope.between(new, owner):
                            self.report.error(
                                f"{m.path}:{name.lineno}: {local} becomes {new}, a local name there"
                            )
                        self._word(m, name, new)
                elif owner.kind == "class":
                    new = self._member_new(m, f"{m.name}.{self._qualname(owner)}", local, name)
                    if new is not None:
                        self._word(m, name, new)
                else:
                    new = self._local_new(m, owner, local)
                    if new is not None:
                        self._word(m, name, new)
        self._imports(m, here, kinds, new_local, expand)
        self._definitions(m)
        for node, scope in m.nodes:
            if isinstance(node, ast.Attribute) and id(node) not in done_attributes:
                self._member_access(m, node)
            elif isinstance(node, ast.Call):
                self._call(m, node, scope, kinds)
        for declared, scope in m.declared:
            self._declaration(m, declared, scope)

    @staticmethod
    def _bound_scope(scope: Scope, name: str) -> Scope:
        return scope.lookup(name) or scope

    @staticmethod
    def _aliased(m: Module, key: Any, kinds: Any, local: str, module: str) -> bool:
        return local != module.rpartition(".")[2] or "." not in module

    def _conflict(
        self, m: Module, refs: Iterable[Any], owner: Scope, target: str, kinds: Any
    ) -> bool:
        if any(scope.between(target, owner) for _, scope in refs):
            return True
        if target in owner.bound:
            other = kinds.get((id(owner), target))
            if other is not None and other[0] == "module":
                return self.new_module(other[1]).rpartition(".")[2] == target
            if other is not None:
                return self.new_symbol(other[1], other[2]) == target
            return self.plan.symbols.get((m.name, target), target) == target
        return False

    @staticmethod
    def _attributes(refs: Iterable[Any], parents: dict[int, ast.AST]) -> set[str] | None:
        result = set()
        for name, _ in refs:
            parent = parents.get(id(name))
            if not isinstance(parent, ast.Attribute) or not isinstance(parent.ctx, ast.Load):
                return None
            result.add(parent.attr)
        return result

    def _any_conflict(
        self, m: Module, refs: Any, owner: Scope, module: str, attributes: set[str], kinds: Any
    ) -> bool:
        for attribute in attributes:
            if self.tree.origin(module, attribute) is None:
                return True
            new = self.new_symbol(module, attribute)
            if new in owner.bound or any(scope.between(new, owner) for _, scope in refs):
                return True
        return False

    def _chain(
        self, m: Module, attribute: ast.Attribute, module: str, parents: dict[int, ast.AST]
    ) -> bool:
        """``package.module.attr``, where the first name is a package."""
        full = f"{module}.{attribute.attr}"
        if not self.tree.is_module(full):
            return False
        source = self.tree.modules.get(module)
        if source is not None and attribute.attr in source.top.bound:
            return False
        parent = parents.get(id(attribute))
        if isinstance(parent, ast.Attribute):
            deeper = self._chain(m, parent, full, parents)
            if not deeper:
                new = self.new_symbol(full, parent.attr)
                if new != parent.attr:
                    self._attribute(m, parent, new)
        new_full = self.new_module(full)
        if new_full != full:
            if new_full.rpartition(".")[0] == self.new_module(module):
                self._attribute(m, attribute, new_full.rpartition(".")[2])
            else:
                self.report.error(f"{m.path}:{attribute.lineno}: {full} in an expression")
        return True

    # --- words
    def _word(self, m: Module, name: ast.Name, new: str) -> None:
        if not m.replace_word(m.span(name)[0], name.id, new):
            self._within_string(m, name, name.id, new)

    def _attribute(self, m: Module, node: ast.Attribute, new: str) -> None:
        end = m.span(node)[1]
        if not m.replace_word(end - len(node.attr.encode()), node.attr, new):
            self._within_string(m, node, ast.unparse(node), ast.unparse(node.value) + "." + new)

    def _within_string(self, m: Module, node: Any, old: str, new: str) -> None:
        """An f-string, whose inner positions Python 3.11 gets wrong."""
        for outer, _ in m.nodes:
            if isinstance(outer, ast.JoinedStr) and any(n is node for n in ast.walk(outer)):
                start, end = m.span(outer)
                text = m.data[start:end].decode()
                hits = [x.start() for x in re.finditer(rf"(?<![\w.]){re.escape(old)}\b", text)]
                for hit in hits:
                    at = start + len(text[:hit].encode())
                    edit = (at, at + len(old.encode()), new)
                    if edit not in m.edits:
                        m.edits.append(edit)
                if hits:
                    return
        self.report.error(f"{m.path}:{node.lineno}: {old} -> {new}: not found in the text")

    # --- imports
    def _imports(self, m: Module, here: str, kinds: Any, new_local: Any, expand: Any) -> None:
        for item in m.imports:
            node = item.node
            lines: list[str] = []
            same = True
            if isinstance(node, ast.Import):
                if not any(self.tree.is_module(a.name) for a in node.names):
                    continue
                changed = False
                for alias in node.names:
                    new = self.new_module(alias.name)
                    changed |= new != alias.name
                    lines.append(f"import {new}" + (f" as {alias.asname}" if alias.asname else ""))
                if not changed:
                    continue
            else:
                if node.module is None or not self.tree.is_module(node.module):
                    continue
                for alias in node.names:
                    local = alias.asname or alias.name
                    owner = self._bound_scope(item.scope, local)
                    key = id(owner), local
                    kind = kinds[key]
                    new = new_local[key]
                    if new is SELF:
                        same = False
                        continue
                    same &= new == local and self.new_module(node.module) == node.module
                    if kind[0] == "module":
                        same &= self.new_module(kind[1]) == kind[1]
                    else:
                        same &= self.new_symbol(kind[1], kind[2]) == kind[2]
                    if kind[0] == "module":
                        target = self.new_module(kind[1])
                        if new is None:
                            for attribute in sorted(expand[key]):
                                lines.append(
                                    f"from {target} import {self.new_symbol(kind[1], attribute)}"
                                )
                            continue
                        parent, _, leaf = target.rpartition(".")
                        renamed = "" if new == leaf else f" as {new}"
                        lines.append(f"from {parent} import {leaf}{renamed}")
                    else:
                        target = self.new_module(kind[1])
                        name = self.new_symbol(kind[1], kind[2])
                        if target == here and kind[1] != m.name:
                            same = False
                            if new != name:
                                self.report.error(
                                    f"{m.path}: {kind[2]} is imported as {new} into its own module"
                                )
                            continue
                        explicit = alias.asname == alias.name  # exported from here
                        renamed = "" if new == name and not explicit else f" as {new}"
                        lines.append(f"from {target} import {name}{renamed}")
            if isinstance(node, ast.ImportFrom) and same:
                continue
            start, end = m.span(node)
            line_end = m.data.find(b"\n", end)
            after = m.data[end:line_end].decode()
            quiet = re.search(r"# (?:noqa: |type: )\S+", m.data[start:line_end].decode())
            if quiet:
                lines = [f"{line}  {quiet[0]}" for line in lines]
                end = line_end if quiet[0] in after else end
            indent = "\n" + " " * node.col_offset
            text = indent.join(lines)
            if not lines:
                text = "pass" if self._alone(m, node) else "# wfbp-layout: import dropped"
            if m.data[start:end].decode() != text:
                m.edit(start, end, text)

    @staticmethod
    def _alone(m: Module, node: ast.stmt) -> bool:
        for outer, _ in m.nodes:
            for name in ("body", "orelse", "finalbody"):
                block = getattr(outer, name, None)
                if isinstance(block, list) and block == [node]:
                    return True
        return False

    # --- definitions
    @staticmethod
    def _qualname(scope: Scope) -> str:
        parts: list[str] = []
        current: Scope | None = scope
        while current is not None and current.kind != "module":
            parts.append(getattr(current.node, "name", "<lambda>"))
            current = current.parent
        return ".".join(reversed(parts))

    def _definitions(self, m: Module) -> None:
        for node, scope in m.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                old = node.name
                new: str | None = None
                if scope.kind == "module":
                    new = self.plan.symbols.get((m.name, old))
                elif scope.kind == "class":
                    new = self._member_new(m, f"{m.name}.{self._qualname(scope)}", old, node)
                else:
                    new = self._local_new(m, scope, old)
                if new and new != old:
                    start, _ = m.span(node)
                    word = b"class " if isinstance(node, ast.ClassDef) else b"def "
                    at = m.data.index(word + old.encode(), start) + len(word)
                    m.replace_word(at, old, new)
                if isinstance(node, ast.ClassDef):
                    self._slots(m, node, scope)
                else:
                    self._params(m, node)
            elif isinstance(node, ast.Lambda):
                continue

    def _slots(self, m: Module, node: ast.ClassDef, scope: Scope) -> None:
        qualname = ".".join(filter(None, [m.name, self._qualname(scope), node.name]))
        for statement in node.body:
            if (
                isinstance(statement, ast.Assign)
                and isinstance(statement.targets[0], ast.Name)
                and statement.targets[0].id == "__slots__"
            ):
                for part in ast.walk(statement.value):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        new = self._member_new(m, qualname, part.value, part)
                        if new:
                            start, end = m.span(part)
                            m.edit(start, end, f'"{new}"')

    def _params(self, m: Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        inner: Scope = node._scope  # type: ignore[union-attr]
        for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            new = self._local_new(m, inner, arg.arg)
            if new is not None:
                m.replace_word(m.at(arg.lineno, arg.col_offset), arg.arg, new)

    def _local_new(self, m: Module, scope: Scope, name: str) -> str | None:
        qualname = f"{m.name}.{self._qualname(scope)}"
        new = self.plan.params.get((qualname, name)) or self.plan.locals.get((qualname, name))
        if new is None and self.words_apply(m.name, name):
            new = self.plan.words[name]
        if new is not None and new in scope.bound and new != name:
            self.report.error(f"{m.path}: {qualname}: {name} -> {new}, which is bound there")
            return None
        return new

    def words_apply(self, module: str, name: str) -> bool:
        return (
            name in self.plan.words
            and module.partition(".")[0] in ("wfbp", "tests")
            and (module, name) not in self.plan.not_words
            and module.startswith(self.plan.word_scopes.get(name, ("",)))
        )

    def _declaration(self, m: Module, node: ast.Global | ast.Nonlocal, scope: Scope) -> None:
        for name in node.names:
            new = self.plan.symbols.get((m.name, name)) if isinstance(node, ast.Global) else None
            if new:
                start, end = m.span(node)
                text = m.data[start:end].decode()
                m.edit(start, end, re.sub(rf"\b{name}\b", new, text))

    # --- members
    def _member_new(self, m: Module, owner: str, name: str, node: ast.AST) -> str | None:
        if self.plan.member is None:
            return None
        return self.plan.member({owner}, name, m, node)

    def _member_access(self, m: Module, node: ast.Attribute) -> None:
        if self.plan.member is None:
            return
        visitor = self.analysis.visitors.get(m.name)
        key = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        infos = visitor.members.get((key, node.attr)) if visitor is not None else None
        new = self.plan.member(infos, node.attr, m, node)
        if new:
            self._attribute(m, node, new)

    def _call(self, m: Module, node: ast.Call, scope: Scope, kinds: Any) -> None:
        key = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        visitor = self.analysis.visitors.get(m.name) if self.analysis is not None else None
        for keyword in node.keywords:
            if keyword.arg is None or visitor is None:
                continue
            new = None
            infos = visitor.keywords.get((key, keyword.arg))
            if infos:
                new = self.plan.member(infos, keyword.arg, m, keyword) if self.plan.member else None
                if new is None:
                    for info in infos:
                        if info != "?":
                            new = new or self.plan.params.get(
                                (f"{info.fullname}.__init__", keyword.arg)
                            )
            if new is None:
                for callee in visitor.callees.get(key, ()):
                    new = new or self.plan.params.get((callee, keyword.arg))
            if new is None and keyword.arg in self.plan.words:
                called_ours = [
                    c
                    for c in [
                        *visitor.callees.get(key, ()),
                        *(i.fullname for i in infos or () if i != "?"),
                    ]
                    if self.words_apply(c, keyword.arg)
                ]
                fields = [i for i in infos or () if i != "?" and keyword.arg in i.names]
                if called_ours and not fields:
                    new = self.plan.words[keyword.arg]
                elif not called_ours and not visitor.callees.get(key) and not infos:
                    self.report.note(
                        f"{m.path}:{keyword.lineno}: keyword {keyword.arg} of an unknown function"
                    )
            if new:
                m.replace_word(m.at(keyword.lineno, keyword.col_offset), keyword.arg, new)
        # monkeypatch.setattr(target, "name", ...), getattr(target, "name"), ...
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(
            node.func, "id", ""
        )
        if called not in ("setattr", "getattr", "hasattr", "delattr", "object"):
            return
        if len(node.args) < 2 or not isinstance(node.args[1], ast.Constant):
            return
        target, constant = node.args[0], node.args[1]
        if not isinstance(constant.value, str):
            return
        new = None
        if isinstance(target, ast.Name):
            owner = scope.lookup(target.id)
            kind = kinds.get((id(owner), target.id)) if owner is not None else None
            if kind is not None and kind[0] == "module":
                new = self.new_symbol(kind[1], constant.value)
        if (new is None or new == constant.value) and self.plan.member and visitor is not None:
            if isinstance(target, ast.Name):
                at = (target.lineno, target.col_offset, target.end_lineno, target.end_col_offset)
                infos = visitor.values.get(at)
                if infos:
                    new = self.plan.member(infos, constant.value, m, constant)
        if new and new != constant.value:
            start, end = m.span(constant)
            m.edit(start, end, f'"{new}"')
