"""Renames of methods, attributes and fields, by the classes that own them."""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import Any

import names
from members import ANY, MODULE, Analysis, ours
from relocate import Report, Tree
from source import Module


class Members:
    """Groups of members that must have one name: what overrides or implements each other."""

    def __init__(self, analysis: Analysis, tree: Tree, report: Report) -> None:
        self.analysis, self.report = analysis, report
        self.parent: dict[tuple[str, str], tuple[str, str]] = {}
        self.owners: dict[str, set[str]] = defaultdict(set)  # member -> classes that define it
        self.used: set[str] = set()
        self.untyped: dict[str, list[str]] = defaultdict(list)
        infos = analysis.infos
        for full, info in infos.items():
            for name in info.names:
                self.owners[name].add(full)
                for base in info.mro[1:]:
                    if name in base.names:
                        self.union((full, name), (base.fullname, name))
        for protocol in infos.values():
            if not protocol.is_protocol or not ours(protocol.fullname):
                continue
            wanted = {n for n in protocol.names if not n.startswith("__")}
            if not wanted:
                continue
            for info in infos.values():
                if info is protocol:
                    continue
                if all(any(n in base.names for base in info.mro) for n in wanted):
                    for n in wanted:
                        for base in info.mro:
                            if n in base.names:
                                self.union((base.fullname, n), (protocol.fullname, n))
                                break
        self.new: dict[tuple[str, str], str] = {}  # root of the group -> new name
        self.table = names.members(report)
        for (owner, name), new in self.table.items():
            if owner not in infos:
                report.error(f"members: no class {owner}")
                continue
            if name not in infos[owner].names:
                report.error(f"members: {owner} has no {name}")
                continue
            root = self.find((owner, name))
            if self.new.get(root, new) != new:
                report.error(f"members: {owner}.{name} -> {new} and {self.new[root]}")
            self.new[root] = new
        for full, info in infos.items():
            for name, new in names.MEMBER_WORDS.items():
                if full.startswith("wfbp.") and name in info.names:
                    self.table[full, name] = new
                    self.new.setdefault(self.find((full, name)), new)
        self.outside: set[tuple[str, str]] = set()
        for key in list(self.parent):
            root = self.find(key)
            if root in self.new and not ours(key[0]):
                report.error(f"members: {root[0]}.{root[1]} is also {key[0]}'s")
        # new names must be free in each class
        for full, info in infos.items():
            for name in info.names:
                new = self.new.get(self.find((full, name)))
                if new is None:
                    continue
                for base in info.mro:
                    if new in base.names and self.new.get(self.find((base.fullname, new))) is None:
                        report.error(f"members: {full}.{name} -> {new}, which {base.fullname} has")
        # names all of whose definitions within wfbp get the same new name
        self.everywhere: dict[str, str] = {}
        for name in {n for _, n in self.table}:
            targets = {
                self.new.get(self.find((owner, name)))
                for owner in self.owners[name]
                if owner.startswith("wfbp.")
            }
            if len(targets) == 1 and None not in targets and name not in names.NOT_EVERYWHERE:
                self.everywhere[name] = targets.pop() or ""

    def find(self, key: tuple[str, str]) -> tuple[str, str]:
        while self.parent.get(key, key) != key:
            key = self.parent[key]
        return key

    def union(self, one: tuple[str, str], other: tuple[str, str]) -> None:
        self.parent.setdefault(one, one)
        self.parent.setdefault(other, other)
        a, b = self.find(one), self.find(other)
        if a != b:
            self.parent[a] = b

    def rename(self, infos: Any, name: str, module: Module, node: ast.AST) -> str | None:
        if (name not in self.owners and name not in self.everywhere) or name.startswith("__"):
            return None
        where = f"{module.path}:{getattr(node, 'lineno', '?')}"
        results: set[str | None] = set()
        unknown = not infos
        for info in infos or ():
            if isinstance(info, str) and info in (ANY,):
                unknown = True
                continue
            if isinstance(info, str) and info == MODULE:
                results.add(None)
                continue
            if isinstance(info, str):
                info = self.analysis.infos.get(info)
                if info is None:
                    unknown = True
                    continue
            for base in info.mro:
                if name in base.names:
                    found = self.new.get(self.find((base.fullname, name)))
                    if found is None and base.fullname.startswith("tests."):
                        found = self.everywhere.get(name)  # a stand-in that nothing ties to it
                        if found and not isinstance(node, ast.Attribute):
                            self.report.note(f"{where}: {base.fullname}.{name} -> {found}: taken for")
                    results.add(found)
                    break
            else:
                if info.fallback_to_any or any(b.fallback_to_any for b in info.mro):
                    unknown = True
                else:
                    results.add(None)
        if unknown and not results:
            if name in self.everywhere:
                return self.everywhere[name]
            if any(n == name for _, n in self.table):
                override = names.UNTYPED.get((str(module.path), name))
                if override is not None:
                    return override or None
                self.untyped[name].append(where)
            return None
        if len(results) > 1:
            self.report.error(f"{where}: .{name} has several names: {results}")
            return None
        return results.pop() if results else None

    def finish(self) -> None:
        for name, places in sorted(self.untyped.items()):
            self.report.note(f"untyped .{name}: left as it is at {', '.join(sorted(set(places)))}")
