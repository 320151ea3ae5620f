"""Holds the reference against the package: every public name is there, and has a docstring.

Public are the names in ``__all__`` of the modules below and, of classes among them, the methods and
properties that they define and whose names do not begin with an underscore.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

MODULES = (
    "wfbp",
    "wfbp.torch",
    "wfbp.horovod.torch.elastic",
    "wfbp.jax",
    "wfbp.errors",
    "wfbp.core.bound",
    "wfbp.core.cost",
    "wfbp.core.fit",
    "wfbp.core.plan",
    "wfbp.core.planners",
    "wfbp.core.timeline",
    "wfbp.core.trace",
    "wfbp.sim.scaling",
    "wfbp.sim.sweep",
)


def names_of(module: Any) -> list[str]:
    """``__all__``; without one, the public functions and classes that the module defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def members_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class defines itself."""
    for name, value in vars(cls).items():
        if not name.startswith("_") and (
            inspect.isfunction(value) or isinstance(value, (classmethod, property, staticmethod))
        ):
            yield name, value


def public_names() -> Iterator[tuple[str, Any]]:
    """Every public name, in full, and its object."""
    for place in MODULES:
        module = import_module(place)
        yield place, module
        for name in names_of(module):
            value = getattr(module, name)
            yield f"{place}.{name}", value
            if inspect.isclass(value) and value.__module__.startswith("wfbp"):
                for member, of_class in members_of(value):
                    yield f"{place}.{name}.{member}", of_class


def has_docstring(value: Any) -> bool:
    """Whether it is documented itself; constants are documented where the reference lists them."""
    kinds = (classmethod, property, staticmethod)
    if inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value):
        return bool(inspect.getdoc(value))
    return not isinstance(value, kinds) or bool(inspect.getdoc(value))


def _of_class(value: Any) -> bool:
    """Whether it is a class, or a method or property of one."""
    kinds = (classmethod, property, staticmethod)
    if inspect.isclass(value) or isinstance(value, kinds):
        return True
    return inspect.isfunction(value) and "." in value.__qualname__


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names that the reference lacks, and of those without a docstring."""
    logger = logging.getLogger(__name__)
    listed = env.domains.python_domain.objects
    # A class may be public in several modules, and is described in one of them.
    classes = {id(value) for name, value in public_names() if name in listed and _of_class(value)}
    for name, value in public_names():
        if not has_docstring(value):
            logger.warning("%s is public and has no docstring", name)
        elif name not in listed and not (_of_class(value) and id(value) in classes):
            logger.warning("%s is public and missing in the reference (docs/reference/api)", name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True}
