"""The rules by name, and the forms of a program that they lead to.

Rules that never make a program slower are applied wherever they can be; of the others every
combination is a form of its own, for a search to choose from.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from warploom.rewrites.accumulators import swap_operands
from warploom.rewrites.arithmetic import divide_once_a_row
from warploom.rewrites.exponents import in_powers_of_two
from warploom.rewrites.in_place import mask_in_place
from warploom.rewrites.masks import skip_masked_blocks, split_mask_loop
from warploom.rewrites.replay import NotApplicable
from warploom.rewrites.rescaling import lazy_rescale, optimistic_rescale
from warploom.tile import Program

POWERS_LAZY, POWERS_OPTIMISTIC = 8.0, 12.0  # of 2; FlashAttention-4's, and half of what fp16 bears


@dataclass(frozen=True)
class Rule:
    """A rule under a name; `apply` raises `NotApplicable` where a program has no place for it."""

    name: str
    apply: Callable[[Program], Program]
    made_by: Callable[..., Program]

    def told(self, what: str) -> str:
        """What the rule requires, keeps or costs, in the words of its description."""
        text = inspect.cleandoc(self.made_by.__doc__ or "")
        found = re.search(rf"^\*{what}\*(.*(?:\n +.*)*)", text, re.MULTILINE)
        return " ".join(found.group(1).split()) if found else ""


ALWAYS = (
    Rule("in_powers_of_two", in_powers_of_two, in_powers_of_two),
    Rule("divide_once_a_row", divide_once_a_row, divide_once_a_row),
    Rule("skip_masked_blocks", skip_masked_blocks, skip_masked_blocks),
)
# Of each group at most one, in this order: a later one finds what the former left.
CHOICES = (
    (Rule("mask_in_place", mask_in_place, mask_in_place),),
    (Rule("swap_operands", swap_operands, swap_operands),),
    (Rule("split_mask_loop", split_mask_loop, split_mask_loop),),
    (
        Rule("lazy_rescale", lambda p: lazy_rescale(p, POWERS_LAZY), lazy_rescale),
        Rule(
            "optimistic_rescale",
            lambda p: optimistic_rescale(p, POWERS_OPTIMISTIC),
            optimistic_rescale,
        ),
    ),
)
RULES = {rule.name: rule for rule in (*ALWAYS, *(rule for group in CHOICES for rule in group))}


@dataclass(frozen=True)
class Form:
    """A form of a program, and the rules that made it, in order."""

    rules: tuple[str, ...]
    program: Program


def forms(program: Program) -> tuple[Form, ...]:
    """The forms of a program: the plain one, with what is always worth doing, first."""
    applied: list[str] = []
    for rule in ALWAYS:
        try:
            program = rule.apply(program)
            applied.append(rule.name)
        except NotApplicable:
            continue
    found: dict[Program, Form] = {}
    for form in _chosen(Form(tuple(applied), program), CHOICES):
        found.setdefault(form.program, form)
    return tuple(found.values())


def _chosen(form: Form, groups: Sequence[Sequence[Rule]]) -> Iterator[Form]:
    if not groups:
        yield form
        return
    first, *rest = groups
    yield from _chosen(form, rest)
    for rule in first:
        try:
            program = rule.apply(form.program)
        except NotApplicable:
            continue
        yield from _chosen(Form((*form.rules, rule.name), program), rest)


def applied(program: Program, rules: Sequence[str]) -> Program:
    """The program after these rules; raises `NotApplicable` where one of them has no place."""
    for name in rules:
        program = RULES[name].apply(program)
    return program
