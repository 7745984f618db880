"""The pages of reports: each is one self-contained HTML file, with no link to anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2

from warploom import __version__

# Operations on the special-function unit, which have a colour of their own.
SPECIAL = ("exp", "exp2", "log", "log2", "reciprocal", "rsqrt", "sqrt", "tanh", "sigmoid", "div")


@dataclass(frozen=True)
class Figure:
    """A number of the first screen; `kind` says where it is from: measured, predicted, bound."""

    value: str
    unit: str
    about: str
    kind: str


@cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("warploom.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def sentence(text: str) -> str:
    """`text` with a capital."""
    return f"{text[:1].upper()}{text[1:]}"


def rendered(template: str, **values: Any) -> str:
    """A page by its template, which also gets the package's `version`; strings are escaped."""
    return _templates().get_template(template).render(version=__version__, **values)
