"""Inline PTX as C++: an `asm` statement becomes calls of the emulated machine, line for line.

What an instruction does stands in `instructions`; here are the statement, its operands, registers,
labels and predicates. An instruction outside of the subset is an error with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from warploom.emulate.instructions import translated
from warploom.emulate.operands import Operand, c_type
from warploom.errors import InputError

STATEMENT = re.compile(r"\b(?:asm|__asm__)\b\s*(?:volatile\b|__volatile__\b)?\s*\(")
SKIPPED = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", re.DOTALL)
LITERAL = re.compile(r'\s*"((?:\\.|[^"\\])*)"')
CONSTRAINT = re.compile(r'\s*(?:\[(\w+)\]\s*)?"([^"]*)"\s*\((.*)\)\s*$', re.DOTALL)
LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)(\(([^)]*)\))?[ \t]+(\S.*)$", re.MULTILINE)
MOST_EXPANSIONS = 1000
OPENING, CLOSING = "([{", ")]}"


@dataclass(frozen=True)
class _Bound:
    """An operand of the statement: its constraint and its C++."""

    name: str
    constraint: str
    text: str


def asm_as_calls(source: str, name: str) -> str:
    """The source with every asm statement as calls; `InputError` names what is not known."""
    parts: list[str] = []
    end = 0
    plain, macros = blanked(source), _macros(source)
    for number, (start, inside, stop) in enumerate(_statements(plain)):
        line = source.count("\n", 0, start) + 1
        kernel = _in_kernel(plain, start)
        try:
            body = _expanded(source[inside : stop - 1], macros)
            text = _statement(body, number, kernel)
        except InputError as error:
            raise InputError(f"{name}:{line}: {error}") from None
        lines = re.findall(r"\\?\n", source[start:stop])
        parts += [source[end:start], text, "".join(lines)]
        end = stop
    return "".join([*parts, source[end:]])


def _macros(source: str) -> dict[str, tuple[list[str] | None, str]]:
    """Parameters (None: it takes none) and text of every macro of the source."""
    joined = source.replace("\\\n", " ")
    return {
        found[1]: (None if found[2] is None else [p.strip() for p in found[3].split(",")], found[4])
        for found in MACRO.finditer(joined)
    }


def _expanded(text: str, macros: dict[str, tuple[list[str] | None, str]]) -> str:
    """An asm statement with the macros replaced that stand in it: they may bring operands."""
    for _ in range(MOST_EXPANSIONS):
        plain = blanked(text)
        for found in re.finditer(r"\b[A-Za-z_]\w*", plain):
            parameters, body = macros.get(found[0], (None, ""))
            end = found.end()
            if not body or (parameters is not None and plain[end : end + 1] != "("):
                continue
            if parameters is not None:
                end = closing(plain, end + 1)
                given = split(text[found.end() + 1 : end - 1])
                for name, value in zip(parameters, given, strict=False):
                    body = re.sub(rf"\b{name}\b", lambda _, value=value: value.strip(), body)
            text = text[: found.start()] + body + text[end:]
            break
        else:
            return text
    raise InputError("the macros of an asm statement are not done after many replacements")


def blanked(source: str) -> str:
    """The source with comments and strings as spaces, in the same places."""
    return SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


def closing(text: str, start: int) -> int:
    """Where the bracket that is open before `start` closes, plus one."""
    depth = 1
    for found in re.finditer(r"[()\[\]{}]", text[start:]):
        depth += 1 if found[0] in OPENING else -1
        if depth == 0:
            return start + found.end()
    raise InputError("a bracket is not closed")


def split(text: str, mark: str = ",") -> list[str]:
    """The parts between marks outside of brackets and strings."""
    plain, depth, parts, last = blanked(text), 0, list[str](), 0
    for at, letter in enumerate(plain):
        depth += (letter in OPENING) - (letter in CLOSING)
        if letter == mark and depth == 0:
            parts.append(text[last:at])
            last = at + 1
    return [*parts, text[last:]]


def _statements(plain: str) -> Iterator[tuple[int, int, int]]:
    """(start, first character inside the parentheses, end) of every asm statement."""
    for found in STATEMENT.finditer(plain):
        yield found.start(), found.end(), closing(plain, found.end())


def _in_kernel(plain: str, at: int) -> bool:
    """Whether the place is in a kernel's own body: its variables last as long as the kernel."""
    depth = 0
    for place in range(at - 1, -1, -1):
        depth += (plain[place] == "}") - (plain[place] == "{")
        if depth < 0:
            header = re.split(r"[;{}]", plain[:place])[-1]
            if "(" in header and re.search(r"\)\s*$", header):
                if "__global__" in header:
                    return True
                if not re.match(r"\s*(if|for|while|switch)\b", header):
                    return False
            depth = 0
    return False


def _statement(body: str, number: int, kernel: bool) -> str:
    sections = split(body, ":")
    template = "".join(_literals(sections[0]))
    operands = [
        _bound(part) for section in sections[1:3] for part in split(section) if part.strip()
    ]
    if not template.strip():
        return "do {} while (0)"
    program = _Program(number, operands, kernel)
    lines = program.run(template if len(sections) > 1 else template.replace("%", "%%"))
    bound = [f"auto&& o{i} = ({each.text.strip()}); (void)o{i};" for i, each in enumerate(operands)]
    flat = " ".join([*bound, *lines]).replace("\\\n", " ").replace("\n", " ")
    return f"do {{ {flat} }} while (0)"


def _literals(text: str) -> Iterator[str]:
    at = 0
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\\\n", " ", text, flags=re.DOTALL)
    while found := LITERAL.match(text, at):
        yield found[1].encode().decode("unicode_escape")
        at = found.end()
    if text[at:].strip():
        raise InputError(f"asm text that is no string: {text[at:].strip()[:40]!r}")


def _bound(text: str) -> _Bound:
    found = CONSTRAINT.match(text)
    if found is None:
        raise InputError(f'asm operand {text.strip()[:40]!r}: expected "r"(x) or the like')
    return _Bound(found[1] or "", found[2], found[3])


class _Program:
    """The PTX of one statement."""

    def __init__(self, number: int, operands: list[_Bound], kernel: bool) -> None:
        self.number, self.operands, self.kernel = number, operands, kernel
        self.registers: dict[str, str] = {}  # name -> type

    def run(self, text: str) -> list[str]:
        """C++ lines."""
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
        lines: list[str] = []
        at = 0
        while text[at:].strip():
            at += len(text[at:]) - len(text[at:].lstrip())
            if text[at] in "{}":
                lines.append(text[at])
                at += 1
            elif text[at] == ";":
                at += 1
            elif found := LABEL.match(text, at):
                lines.append(f"{self._label(found[1])}:;")
                at = found.end()
            else:
                end = text.find(";", at)
                if end < 0:
                    raise InputError(f"PTX without a semicolon: {text[at:].strip()[:60]!r}")
                lines.append(self._instruction(" ".join(text[at:end].split())))
                at = end + 1
        return lines

    def _label(self, name: str) -> str:
        return f"ptx_{self.number}_" + re.sub(r"\W", "_", name)

    def _instruction(self, text: str) -> str:
        if text.startswith(".reg"):
            return self._declaration(text)
        guard = ""
        if found := re.match(r"@(!?)([\w$%]+)\s+(.*)", text):
            guard = f"if ({found[1]}{self._operand(found[2]).value('bool')}) "
            text = found[3]
        name, _, rest = text.partition(" ")
        if name in ("bra", "bra.uni"):
            return f"{guard}goto {self._label(rest.strip())};"
        operands = [self._operand(part.strip()) for part in split(rest) if part.strip()]
        done = translated(name, operands, self.kernel)
        if done is None:
            raise InputError(f"PTX instruction {text[:70]!r} is not in the emulated subset")
        return f"{guard}{{ {done} }}"

    def _declaration(self, text: str) -> str:
        found = re.match(r"\.reg\s*\.(\w+)\s+(.*)", text)
        kind = found and c_type(found[1])
        if found is None or kind is None:
            raise InputError(f"PTX declaration {text!r} is not in the emulated subset")
        lines: list[str] = []
        for name in found[2].split(","):
            several = re.match(r"\s*([\w$%]+)<(\d+)>", name)
            names = (
                [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name.strip()]
            )
            for each in names:
                clean = "r_" + re.sub(r"\W", "_", each.replace("%%", "%"))
                self.registers[each.replace("%%", "%")] = clean
                lines.append(f"{kind} {clean};")
        return " ".join(lines)

    def _operand(self, text: str) -> Operand:
        if text.startswith("{") and text.endswith("}"):
            inside = [part.strip() for part in split(text[1:-1])]
            return Operand("vector", parts=tuple(map(self._operand, inside)))
        if text.startswith("["):
            inner = [part.strip() for part in split(text[1:-1])]
            base, sign, offset = inner[0].partition("+")
            parts = [self._operand(base.strip())]
            parts += [self._operand(part) for part in inner[1:]]
            more = f" + ({self._operand(offset.strip()).value('int')})" if sign else ""
            return Operand("address", parts=tuple(parts), text=more)
        if "|" in text:
            return Operand("pair", parts=tuple(map(self._operand, text.split("|"))))
        if found := re.fullmatch(r"%(\d+)|%\[(\w+)\]", text):
            which = int(found[1]) if found[1] else self._named(found[2])
            if which >= len(self.operands):
                raise InputError(f"asm operand {text} of {len(self.operands)}")
            bound = self.operands[which]
            written = bound.constraint[0] in "=+"
            return Operand("bound", f"o{which}", written=written)
        plain = text.replace("%%", "%")
        if plain in self.registers:
            return Operand("register", self.registers[plain], written=True)
        if plain == "_":
            return Operand("sink")
        if plain.startswith("%"):
            return Operand("special", plain[1:])
        if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", plain):
            return Operand("number", f"numbers::of_bits(0x{found[1]}u)")
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)[uU]?|-?\d+\.\d*", plain):
            return Operand("number", plain)
        raise InputError(f"PTX operand {text!r} is not in the emulated subset")

    def _named(self, name: str) -> int:
        names = [each.name for each in self.operands]
        if name not in names:
            raise InputError(f"asm has no operand of the name {name}")
        return names.index(name)
