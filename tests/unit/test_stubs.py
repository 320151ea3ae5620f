"""Functions that are made of the table: their stubs, their docstrings' examples, their errors."""

from __future__ import annotations

import ast
import doctest
import importlib

import pytest

import wfbp
from tests.support.stubs import PACKAGE, STUBS, stub_of, stub_of_package
from wfbp.runtime import process
from wfbp.runtime.collectives.forms import FORMS


@pytest.mark.parametrize("module", STUBS)
def test_stubs_declare_what_there_is(module: str) -> None:
    """Up to formatting; ``python -m tests.support.stubs`` writes them anew."""
    written, made = ast.parse(STUBS[module].read_text()), ast.parse(stub_of(module))
    assert ast.unparse(written) == ast.unparse(made)
    declared = {node.name for node in written.body if isinstance(node, ast.FunctionDef)}
    assert set(FORMS) <= declared


def test_the_packages_stub_declares_its_names() -> None:
    written = ast.parse((PACKAGE / "__init__.pyi").read_text())
    made = ast.parse(stub_of_package())
    assert sorted(map(ast.unparse, written.body)) == sorted(map(ast.unparse, made.body))


@pytest.mark.parametrize("module", STUBS)
def test_examples_of_generated_functions_run(module: str) -> None:
    functions = importlib.import_module(module)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    try:
        for name in FORMS:
            for example in finder.find(getattr(functions, name), name, module=False, globs={}):
                runner.run(example)
    finally:
        process.shutdown()
    assert runner.summarize(verbose=False).failed == 0
    assert runner.tries > 0


def test_arguments_of_generated_functions() -> None:
    for arguments, options, told in (
        ((), {}, r"allreduce\(\): missing a required argument: 'tensor'"),
        (
            (1.0,),
            {"nam": "x"},
            "unexpected keyword argument 'nam'; its arguments are tensor, name, op",
        ),
        ((1.0, "x"), {"name": "x"}, "multiple values for argument 'name'"),
        (range(9), {}, "too many positional arguments"),
    ):
        with pytest.raises(TypeError, match=told):
            wfbp.allreduce(*arguments, **options)  # type: ignore[call-overload]
    assert wfbp.allreduce.__module__ == "wfbp.collectives"
