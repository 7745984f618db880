"""Faults made from a module's syntax tree, one at a time."""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterator

from tests.mutants.model import PACKAGE, ROOT, Checker, Equivalent, Mutant, MutantError

SHIFTED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
CONTAINERS = ("tuple", "list", "dict", "set", "frozenset")
ORDERING = re.compile(r"fence|wait|arrive|commit|sync")


def generated(checkers: list[Checker]) -> list[Mutant]:
    """Every generated fault of the modules that the checkers name.

    Raises `MutantError` where what is called equivalent is not one of them.
    """
    found: list[Mutant] = []
    for checker in checkers:
        named = Counter[Equivalent]()
        for module in checker.modules:
            source = (ROOT / PACKAGE / module).read_text()
            lines = [line.strip() for line in source.splitlines()]
            of_line: dict[tuple[str, str, str], list[int]] = {}
            every = [(source.count("\n", 0, at), at, *fault) for at, *fault in faults(source)]
            for row, at, before, after, _ in sorted(every):
                of_line.setdefault((lines[row], before, after), []).append(at)
            for row, at, before, after, why in every:
                nth = of_line[lines[row], before, after].index(at)
                place = f"{lines[row]} #{nth + 1}" if nth else lines[row]
                same = [
                    each
                    for each in checker.equivalents
                    if (each.file, each.before, each.after) == (module, before, after)
                    and each.ends(lines[: row + 1])
                ]
                named.update(same)
                argued = same[0].why if same else ""
                fault = module, before, after, why, checker.tests, argued
                found.append(Mutant("generated", checker.name, *fault, at=at, place=place))
        for each in checker.equivalents:
            if named[each] != 1:
                text = f"{named[each]} faults {each.before!r} -> {each.after!r} in {each.line!r}"
                raise MutantError(f"{each.file}: {text}, expected 1")
    return found


def faults(source: str) -> Iterator[tuple[int, str, str, str]]:
    """(place, text, text instead, which kind) of every fault in a module."""
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.splitlines()

    def offset(row: int, column: int) -> int:  # the tree counts bytes
        return starts[row - 1] + len(lines[row - 1].encode()[:column].decode())

    for node, replaced, why in _replacements(tree):
        start = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        yield start, source[start:end], replaced, why


def _replacements(tree: ast.Module) -> Iterator[tuple[ast.AST, str, str]]:
    silent = _silent(tree)
    for node in ast.walk(tree):
        if node in silent:
            continue
        match node:
            case ast.Raise() | ast.AugAssign() | ast.Continue():
                yield node, "pass", "dropped statement"
            case ast.Expr(value=ast.Call() | ast.YieldFrom()):
                yield node, "pass", "dropped statement"
            case ast.Compare(ops=[first, *_]) if type(first) in SHIFTED:
                other = copy.deepcopy(node)
                other.ops[0] = SHIFTED[type(first)]()
                yield node, f"({ast.unparse(other)})", "shifted comparison"
            case ast.Call(func=ast.Name(id="min" | "max" as name)):
                yield node.func, "max" if name == "min" else "min", "swapped min and max"
            case ast.BoolOp():
                other = copy.deepcopy(node)
                other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
                yield node, f"({ast.unparse(other)})", "swapped and and or"
            case ast.Constant(value=bool() | None):
                continue
            case ast.Constant(value=int() as value):
                yield node, str(value + 1), "changed constant"
            case ast.Constant(value=float() as value) if value:
                yield node, repr(2 * value), "changed constant"
            case ast.Constant(value=str() as value) if ORDERING.search(value) and "(" in value:
                yield node, '""', "removed fence, wait, arrive or commit"
            case ast.JoinedStr() if ORDERING.search(ast.unparse(node)) and "(" in ast.unparse(node):
                yield node, '""', "removed fence, wait, arrive or commit"


def _silent(tree: ast.Module) -> set[ast.AST]:
    """What is no code: docstrings, annotations, messages of errors and findings, parts of
    f-strings (which cannot be replaced one by one)."""
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            roots.append(node)
        if isinstance(node, ast.JoinedStr):
            roots += node.values
        if isinstance(node, ast.Raise) and node.exc is not None:
            roots.append(node.exc)
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation:
            roots.append(node.annotation)
        if isinstance(node, ast.FunctionDef) and node.returns:
            roots.append(node.returns)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in CONTAINERS:
            roots.append(node)  # list[int]
        if isinstance(node, ast.FunctionDef) and node.name in ("__str__", "__repr__"):
            roots.append(node)
    return {inner for root in roots for inner in ast.walk(root)}
