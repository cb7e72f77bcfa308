"""The size law: no function over 40 lines, no file over 400, no function with more than 6 parameters.

A function's lines are those from `def` to its last one: signature, docstring, comments and functions inside of it count,
decorators do not. Parameters are all but `self` and `cls`; `*args` and `**kwargs` are one each. The parameters of a typer
command (a function decorated with `.command(...)`) are the options of the command line and are not counted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.unit.sources import ROOT, files, tree

MAX_FUNCTION, MAX_FILE, MAX_PARAMETERS = 40, 400, 6


def functions(node: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its name, that of a method after its class."""
    for child in ast.iter_child_nodes(node):
        name = (
            f"{inside}{child.name}" if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else ""
        )
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, child
        yield from functions(child, f"{name}." if name else inside)


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if any(isinstance(d, ast.Call) and ast.unparse(d.func).endswith(".command") for d in function.decorator_list):
        return 0
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([n for n in names if n not in ("self", "cls")]) + bool(given.vararg) + bool(given.kwarg)


def too_large() -> dict[str, str]:
    """File or file:function -> what is too much about it."""
    found = {}
    for module, file in files().items():
        place = str(file.relative_to(ROOT))
        lines = len(file.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE:
            found[place] = f"{lines} lines"
        for name, function in functions(tree(module)):
            assert function.end_lineno is not None
            length = function.end_lineno - function.lineno + 1
            if length > MAX_FUNCTION:
                found[f"{place}:{name}"] = f"{length} lines"
            if num_parameters(function) > MAX_PARAMETERS:
                found[f"{place}:{name}"] = f"{num_parameters(function)} parameters"
    return found


def test_nothing_is_too_large() -> None:
    assert too_large() == {}


def test_functions_are_counted_as_the_law_says() -> None:
    source = '''
class A:
    @property
    def b(self, *, c, d=1, **e):
        """One line."""
        def f(): return 1
        return f

@app.command("x")
def g(a, b, c, d, e, f, g): ...
'''
    found = dict(functions(ast.parse(source)))
    assert list(found) == ["A.b", "A.b.f", "g"]
    assert (num_parameters(found["A.b"]), num_parameters(found["g"])) == (3, 0)
    method = found["A.b"]
    assert (method.end_lineno or 0) - method.lineno + 1 == 4
