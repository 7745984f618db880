"""Index expressions in a normal form: sums of products, so that equal ones look alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from warploom.tile import Index
from warploom.tile.index import FOLD, substituted, symbol

Form = Mapping[tuple[str, ...], int]  # factor of each product of symbols; () is the constant
PART = re.compile(r"\((\w+) (//|%) (\d+)\)")
EVERY = "every "  # before a loop's counter: any of its iterations


def form(index: Index) -> Form:
    """The sum of products that an expression is; what is none of these is a symbol of its own.

    c t + r over c is t plus r over c, and its remainder is r's, in whole numbers rounded down.
    """
    if index.op == "const":
        return _clean({(): index.value})
    if index.op == "symbol":
        return {(index.name,): 1}
    left, right = map(form, index.args)
    if index.op in ("+", "-"):
        sign = 1 if index.op == "+" else -1
        keys = {*left, *right}
        return _clean({key: left.get(key, 0) + sign * right.get(key, 0) for key in keys})
    if index.op == "*":
        found: dict[tuple[str, ...], int] = {}
        for one, factor in left.items():
            for other, times in right.items():
                key = tuple(sorted((*one, *other)))
                found[key] = found.get(key, 0) + factor * times
        return _clean(found)
    return _other(index.op, left, right)


def _other(op: str, left: Form, right: Form) -> Form:
    if not {*left, *right} - {()}:
        return _clean({(): FOLD[op](left.get((), 0), right.get((), 0))})
    if op in ("min", "max"):
        return (
            left
            if left == right
            else {(f"{op}({', '.join(sorted(map(text, (left, right))))})",): 1}
        )
    divisor = right.get((), 0) if not set(right) - {()} else 0
    whole = {
        key: value // divisor for key, value in left.items() if divisor > 0 and not value % divisor
    }
    if () not in whole and divisor > 0 and () in left:
        whole[()] = left[()] // divisor
    rest = {key: value - whole.get(key, 0) * divisor for key, value in left.items()}
    rest = _clean(rest)
    if op == "//":
        part = _quotient(rest, right, divisor)
        return _clean({key: whole.get(key, 0) + part.get(key, 0) for key in {*whole, *part}})
    if not set(rest) - {()} and divisor > 0:
        return _clean({(): rest.get((), 0) % divisor})
    return {(f"({_factor(rest)} % {_factor(right)})",): 1}


def _quotient(rest: Form, right: Form, divisor: int) -> Form:
    if not set(rest) - {()} and divisor > 0:
        return {(): rest.get((), 0) // divisor}
    return {(f"({_factor(rest)} // {_factor(right)})",): 1}


def _clean(found: Mapping[tuple[str, ...], int]) -> Form:
    return {key: value for key, value in sorted(found.items()) if value}


def _factor(found: Form) -> str:
    return f"({text(found)})" if len(found) > 1 else text(found)


def text(found: Form) -> str:
    """A form as people write it."""
    if not found:
        return "0"
    words = ""
    for key, factor in sorted(found.items(), key=lambda pair: (not pair[0], pair[0])):
        product = " ".join(key)
        size = abs(factor)
        one = str(size) if not key else product if size == 1 else f"{size} {product}"
        sign = "-" if factor < 0 else "+"
        words += f" {sign} {one}" if words else one if factor > 0 else f"-{one}"
    return words


def same(one: Index, other: Index) -> bool:
    """Whether two expressions are equal whatever their symbols are; False where that is open."""
    return form(one) == form(other)


def over(index: Index, names: Iterable[str]) -> Index:
    """The expression with these symbols free to be those of any iteration."""
    return substituted(index, {name: symbol(EVERY + name) for name in names})


def rises(index: Index, name: str) -> bool:
    """Whether an expression never falls as a symbol grows, as far as its form shows."""
    if name not in index.symbols() or index.op == "symbol":
        return True
    left, right = index.args
    if index.op == "-":
        return rises(left, name) and name not in right.symbols()
    if index.op in ("*", "//"):
        scale = right if index.op == "//" or name in left.symbols() else left
        other = left if scale is right else right
        return scale.op == "const" and scale.value > 0 and rises(other, name)
    return index.op != "%" and rises(left, name) and rises(right, name)


def landing(start: Index, dim: str) -> tuple[Form, dict[str, int]]:
    """A place in a dimension without a term (x // c) dim, which moves it to the end and beyond:
    what is stored there is dropped, so that x counts below c only, as the second result says."""
    found, least = dict(form(start)), dict[str, int]()
    for key, factor in form(start).items():
        part = next((m for one in key if (m := PART.fullmatch(one)) and m[2] == "//"), None)
        if part and factor > 0 and sorted(key) == sorted((part[0], dim)):
            least[part[1]] = int(part[3])
            del found[key]
    return found, least
