"""The marks a drawing is made of: wires, dots, labels, as SVG text."""

from __future__ import annotations

from html import escape

FONT = "font-family='Georgia, Times, serif'"


def curve(x0: float, y0: float, x1: float, y1: float, colour: str, extra: str = "") -> str:
    """A wire: straight when level, a cubic otherwise."""
    if abs(y0 - y1) < 0.5:
        return line(x0, y0, x1, y1, colour, extra)
    half = (x0 + x1) / 2
    width = "" if "stroke-width" in extra else "stroke-width='1.6'"
    return (
        f"<path d='M{x0:.1f} {y0:.1f} C{half:.1f} {y0:.1f} {half:.1f} {y1:.1f} {x1:.1f} {y1:.1f}' "
        f"fill='none' stroke='{colour}' {width} {extra}/>"
    )


def line(x0: float, y0: float, x1: float, y1: float, colour: str, extra: str = "") -> str:
    """A straight wire."""
    width = "" if "stroke-width" in extra else "stroke-width='1.6'"
    return f"<path d='M{x0:.1f} {y0:.1f} L{x1:.1f} {y1:.1f}' stroke='{colour}' {width} {extra}/>"


def branch(x: float, y: float, colour: str) -> str:
    """Where a wire is copied."""
    return f"<circle cx='{x:.0f}' cy='{y:.1f}' r='2.6' fill='{colour}'/>"


def dot(x: float, y: float) -> str:
    """Where a weaved wire enters or leaves a box."""
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.8' fill='#333'/>"


def label(symbol: str, size: float = 12) -> str:
    """`g_q` with its axis as a subscript."""
    head, _, tail = symbol.partition("_")
    if not tail:
        return escape(symbol)
    return f"{escape(head)}<tspan dy='3' font-size='{0.8 * size:.1f}'>{escape(tail)}</tspan>"


def tag(x: float, y: float, text: str, anchor: str, colour: str, size: int = 13) -> str:
    """A small italic label."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size}' "
        f"font-style='italic' fill='{colour}' {FONT}>{label(text, size)}</text>"
    )


def remark(x: float, y: float, text: str) -> str:
    """A line of plain text."""
    return f"<text x='{x:.0f}' y='{y:.0f}' font-size='13' fill='#333' {FONT}>{escape(text)}</text>"


def centre(x: float, y: float, text: str, colour: str) -> str:
    """Centred text of a cost row."""
    return (
        f"<text x='{x:.0f}' y='{y:.0f}' text-anchor='middle' font-size='12' fill='{colour}' {FONT}>"
        f"{escape(text)}</text>"
    )
