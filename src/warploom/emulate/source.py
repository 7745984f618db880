"""CUDA C++ as C++ for the emulated machine: kernels, shared arrays, launches, includes.

Every line keeps its number, so that places in reports are places of the file.
"""

from __future__ import annotations

import re
from pathlib import Path

from warploom.emulate.asm import asm_as_calls, blanked, closing, split
from warploom.errors import InputError

# What cuda.h and host.h stand for; other headers of CUDA are refused.
OWN_HEADERS = (
    "cuda.h", "cuda_runtime.h", "cuda_runtime_api.h", "cuda_bf16.h", "cuda_fp16.h",
    "cudaTypedefs.h", "device_launch_parameters.h",
)  # fmt: skip
LIBRARIES = re.compile(r"\b(cute|cutlass|kittens|nvcuda|thrust|cooperative_groups)\s*::|\bcuda::")
KERNEL = re.compile(r"\b__global__\b")
EXTERN_SHARED = re.compile(
    r"\bextern\s+__shared__\s+((?:__align__|alignas)\s*\([^)]*\)\s*)?([\w:\s]+?)\s*(\w+)\s*\[\s*\]\s*;"
)
SHARED = re.compile(r"(?<!extern )\b__shared__\s+([^;]+);")
ALIGN = re.compile(r"(?:__align__|alignas)\s*\(([^()]*(?:\([^()]*\))?[^()]*)\)\s*")
TYPED = re.compile(
    r"((?:const |volatile )*[\w:]+(?:\s*<.*?>)?(?:\s+(?:long|int|char|short))*)\s+(.*)", re.DOTALL
)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"].*$', re.MULTILINE)
LAUNCH = re.compile(r"<<<(.*?)>>>\s*\(", re.DOTALL)


def as_cpp(text: str, name: str) -> str:
    """C++ of a CUDA source; `InputError` names the line of what is not in the subset."""
    text = INCLUDE.sub(lambda found: _include(found, text, name), text)
    plain = blanked(text)
    if found := LIBRARIES.search(plain):
        line = plain.count("\n", 0, found.start()) + 1
        raise InputError(
            f"{name}:{line}: {found[0].strip()} is a library: the emulation runs plain CUDA C++ "
            "with inline PTX"
        )
    text = _kernels(text)
    text = EXTERN_SHARED.sub(
        lambda found: f"{found[2]}* const {found[3]} = ({found[2]}*)machine::own_shared();", text
    )
    text = _static_shared(text)
    text = LAUNCH.sub(lambda found: _launch(found[1]), text)
    text = re.sub(r'\bextern\s+"C"\s+(?=__global__|static|void|__launch)', "", text)
    return asm_as_calls(text, name)


def read(path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path}: {error}") from None


def _include(found: re.Match[str], text: str, name: str) -> str:
    header = found[2]
    if header in OWN_HEADERS:
        return ""
    if found[1] == '"' or "/" in header or header.startswith("cu") or header.endswith("pp"):
        line = text.count("\n", 0, found.start()) + 1
        raise InputError(f"{name}:{line}: #include of {header}: not in the emulated subset")
    return found[0]


def _kernels(text: str) -> str:
    """Each kernel's body begins by stating its cluster."""
    parts, end, plain = list[str](), 0, blanked(text)
    for found in KERNEL.finditer(plain):
        at, cluster = found.end(), "1"
        while True:
            opening = re.compile(r"[({;]").search(plain, at)
            if opening is None or opening[0] == ";":
                break
            if opening[0] == "{":
                parts += [text[end : opening.end()], f" machine::begin({cluster});"]
                end = opening.end()
                break
            stop = closing(plain, opening.end())
            if re.search(r"__cluster_dims__\s*$", plain[at : opening.start()]):
                sizes = split(text[opening.end() : stop - 1])
                cluster = " * ".join(f"int({size.strip()})" for size in sizes)
            at = stop
    return "".join([*parts, text[end:]])


def _static_shared(text: str) -> str:
    """Shared arrays of fixed size: references into the block's memory."""
    count = 0

    def place(found: re.Match[str]) -> str:
        nonlocal count
        aligned = ALIGN.findall(found[1])
        body = ALIGN.sub("", found[1]).strip()
        align = f"std::max<size_t>({aligned[0]}, 16)" if aligned else "16"
        typed = TYPED.match(body)
        if typed is None:
            raise InputError(f"__shared__ {body[:40]!r}: expected a type and names")
        kind, names = typed.groups()
        made: list[str] = []
        for declared in split(names):
            declarator = re.fullmatch(r"\s*(\w+)\s*((?:\[[^\]]*\]\s*)*)", declared)
            if declarator is None:
                raise InputError(f"__shared__ {body[:40]!r}: expected arrays without a value")
            count += 1
            name, extents = declarator.groups()
            made.append(
                f"typedef {kind} {name}_of_shared{extents}; auto& {name} = "
                f"*({name}_of_shared*)machine::static_shared({count}, "
                f"sizeof({name}_of_shared), {align});"
            )
        return " ".join(made) + "\n" * found[0].count("\n")

    return SHARED.sub(place, text)


def _launch(settings: str) -> str:
    """name<<<grid, block, shared, stream>>>(args): operators of host.h on three parts."""
    given = ", ".join(part.strip() for part in split(settings)[:3])
    return f" * cuda_launch({given}) % cuda_arguments("
