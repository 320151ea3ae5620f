"""Who owns an attribute: asked of mypy, which knows the type of every expression."""

from __future__ import annotations

import sqlite3
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from mypy import build
from mypy.config_parser import parse_config_file
from mypy.find_sources import create_source_list
from mypy.nodes import (
    CallExpr,
    ClassDef,
    Expression,
    MemberExpr,
    MypyFile,
    NameExpr,
    Node,
    RefExpr,
    SuperExpr,
    TypeInfo,
    Var,
)
from mypy.options import Options
from mypy.types import (
    AnyType,
    CallableType,
    Instance,
    LiteralType,
    NoneType,
    Overloaded,
    TupleType,
    Type,
    TypedDictType,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)

OURS = ("wfbp", "tests", "examples", "launch")
ANY = "?"
MODULE = "<module>"

Key = tuple[int, int, int, int]


def ours(name: str) -> bool:
    return name.partition(".")[0] in OURS


def infos_of(type_: Type | None) -> set[Any]:
    """The classes of a value's type; ANY where it is not known."""
    if type_ is None:
        return {ANY}
    proper = get_proper_type(type_)
    if isinstance(proper, Instance):
        return {proper.type}
    if isinstance(proper, UnionType):
        return set().union(*(infos_of(item) for item in proper.items))
    if isinstance(proper, TypeVarType):
        bounds = proper.values or [proper.upper_bound]
        return set().union(*(infos_of(item) for item in bounds))
    if isinstance(proper, TupleType):
        return {proper.partial_fallback.type}
    if isinstance(proper, TypedDictType):
        return {proper.fallback.type}
    if isinstance(proper, LiteralType):
        return {proper.fallback.type}
    if isinstance(proper, TypeType):
        return infos_of(proper.item)
    if isinstance(proper, CallableType):
        return {proper.type_object()} if proper.is_type_obj() else set()
    if isinstance(proper, Overloaded):
        return infos_of(proper.items[0])
    if isinstance(proper, AnyType):
        return {ANY}
    if isinstance(proper, NoneType):
        return set()
    return set()


ELSEWHERE = {
    "node", "info", "type", "unanalyzed_type", "names", "original_def", "def_var", "expanded",
    "definition", "module_ref", "fullname_node", "alias_deps", "metaclass_type",
}  # fmt: skip
"""Attributes of mypy's nodes that lead to definitions, and not down the tree."""


def walk(root: Any) -> list[Any]:
    """All nodes below, also those that mypy's visitors leave out."""
    seen: set[int] = set()
    result: list[Any] = []
    todo = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, (list, tuple)):
            todo.extend(node)
            continue
        if not isinstance(node, Node) or isinstance(node, (TypeInfo, Var)) or id(node) in seen:
            continue
        if isinstance(node, MypyFile) and node is not root:
            continue
        seen.add(id(node))
        result.append(node)
        for kind in type(node).__mro__:
            for name in getattr(kind, "__mypyc_attrs__", ()):
                if name in ELSEWHERE or name.startswith("__"):
                    continue
                try:
                    value = getattr(node, name)
                except AttributeError:
                    continue
                if isinstance(value, (Node, list, tuple)):
                    todo.append(value)
    return result


class Visitor:
    """Collects, by position, the classes that attributes and keywords belong to."""

    def __init__(self, types: dict[Expression, Type], tree: MypyFile) -> None:
        self.types = types
        self.infos: list[Any] = []
        self.members: dict[tuple[Key, str], set[Any]] = defaultdict(set)
        self.keywords: dict[tuple[Key, str], set[Any]] = defaultdict(set)
        self.callees: dict[Key, set[str]] = defaultdict(set)
        self.values: dict[Key, set[Any]] = defaultdict(set)
        for node in walk(tree):
            if isinstance(node, MemberExpr):
                self.visit_member_expr(node)
            elif isinstance(node, SuperExpr):
                self.visit_super_expr(node)
            elif isinstance(node, NameExpr):
                self.visit_name_expr(node)
            elif isinstance(node, CallExpr):
                self.visit_call_expr(node)
            elif isinstance(node, ClassDef) and node.info is not None:
                self.infos.append(node.info)

    @staticmethod
    def key(node: Any) -> Key:
        return node.line, node.column, node.end_line or 0, node.end_column or 0

    def visit_member_expr(self, o: MemberExpr) -> None:
        base = o.expr
        if isinstance(base, RefExpr) and isinstance(base.node, MypyFile):
            self.members[self.key(o), o.name].add(MODULE)
        elif base in self.types:
            self.members[self.key(o), o.name] |= infos_of(self.types[base])
        elif isinstance(base, RefExpr) and isinstance(base.node, TypeInfo):
            self.members[self.key(o), o.name].add(base.node)
        else:
            self.members[self.key(o), o.name].add(ANY)

    def visit_super_expr(self, o: SuperExpr) -> None:
        if o.info is not None:
            self.members[self.key(o), o.name] |= set(o.info.mro[1:2])

    def visit_name_expr(self, o: NameExpr) -> None:
        if o in self.types:
            self.values[self.key(o)] |= infos_of(self.types[o])
        elif isinstance(o.node, TypeInfo):
            self.values[self.key(o)].add(o.node)

    def visit_call_expr(self, o: CallExpr) -> None:
        callee = o.callee
        if isinstance(callee, RefExpr) and callee.fullname:
            self.callees[self.key(o)].add(callee.fullname)
        if isinstance(callee, MemberExpr) and callee.expr in self.types:
            for info in infos_of(self.types[callee.expr]):
                if info != ANY:
                    for base in info.mro:
                        if callee.name in base.names:
                            self.callees[self.key(o)].add(f"{base.fullname}.{callee.name}")
        names = [name for name in o.arg_names if name]
        if names:
            infos = set()
            if callee in self.types:
                proper = get_proper_type(self.types[callee])
                if isinstance(proper, CallableType) and proper.is_type_obj():
                    infos = {proper.type_object()}
                elif isinstance(proper, Overloaded) and proper.is_type_obj():
                    infos = {proper.type_object()}
                elif isinstance(proper, TypeType):
                    infos = infos_of(proper.item)
            if not infos and isinstance(callee, RefExpr) and isinstance(callee.node, TypeInfo):
                infos = {callee.node}
            name = callee.fullname if isinstance(callee, RefExpr) else ""
            if name in ("dataclasses.replace", "copy.replace") and o.args:
                infos = infos_of(self.types.get(o.args[0]))
            if name == "functools.partial" and o.args:
                infos = infos_of(self.types.get(o.args[0]))
                if isinstance(o.args[0], RefExpr) and isinstance(o.args[0].node, TypeInfo):
                    infos = {o.args[0].node}
            if isinstance(callee, MemberExpr) and callee.name == "_replace":
                infos = infos_of(self.types.get(callee.expr))
            for keyword in names:
                self.keywords[self.key(o), keyword] |= infos


class Analysis:
    """What mypy knows of the tree."""

    def __init__(self, root: Path, cache: Path, python: Path) -> None:
        options = Options()
        parse_config_file(options, lambda: None, str(root / "pyproject.toml"), sys.stdout, sys.stderr)
        options.packages = []
        options.export_types = True
        options.preserve_asts = True
        options.check_untyped_defs = True
        options.cache_dir = str(cache)
        options.python_executable = str(python)
        for database in cache.glob("*/cache*.db"):  # ours are read anew: cached, they have no tree
            with sqlite3.connect(database) as connection:
                for part in OURS:
                    connection.execute(
                        "DELETE FROM files2 WHERE path LIKE ? OR path LIKE ?",
                        (f"{part}/%", f"{part}.%"),
                    )
        present = [part for part in OURS if (root / part).exists()]
        result = build.build(create_source_list(present, options), options)
        self.num_errors = len(result.errors)
        trees = sum(1 for name, tree in result.files.items() if ours(name) and tree.defs)
        if trees < 100:
            raise SystemExit(f"mypy has read {trees} files of ours anew; delete {cache} and try again")
        self.visitors: dict[str, Visitor] = {}
        self.infos: dict[str, TypeInfo] = {}
        for name, tree in result.files.items():
            if ours(name) and tree.defs:
                visitor = Visitor(result.types, tree)
                self.visitors[name] = visitor
                for info in visitor.infos:
                    self.infos[info.fullname] = info

