"""How a program's names are written in C++, so that they never meet a name of the emitter's own.

A name that the emitter, the language or the device library uses gets a "_" at its end, and so does
every name that ends in one of the emitter's suffixes or in "_": distinct names stay distinct.
"""

from __future__ import annotations

import re

from warploom.codegen.cuda.prelude import PRELUDE, SIMT_PRELUDE

# What emitted bodies declare for themselves.
LOCALS = frozenset(
    "a at b band band_rows h high i in_band in_plane j lane low part panel panels rank rest row s "
    "shared shared_raw step t task tasks thread_col thread_row warp_group first round next stride "
    "running best found before above below total carry met scratch value_of set add_to better "
    "swap_with "
    "piece column carried_full carried_empty carried_parity "
    "task_ring task_full task_empty task_cursor task_counter handed whose".split()
)
SUFFIXES = (
    "_base _end _full _empty _cursor _oldest _first _staged _room _at _live _start _stop _count "
    "_place _data _slot _turn _own"
).split()
KEYWORDS = frozenset(
    "alignas alignof and asm auto bool break case catch char class const constexpr continue "
    "decltype default delete do double dynamic_cast else enum explicit export extern false final "
    "float for friend goto if inline int long mutable namespace new noexcept not nullptr operator "
    "or override private protected public register reinterpret_cast requires return short signed "
    "sizeof static static_assert static_cast struct switch template this throw true try typedef "
    "typeid typename union unsigned using virtual void volatile while xor "
    "DEVICE INFINITY NAN blockIdx blockDim gridDim threadIdx warpSize min max abs "
    "fabsf fmaf fmaxf fminf copysignf rsqrtf sinf cosf".split()
)
RESERVED = LOCALS | KEYWORDS | PRELUDE.keys() | SIMT_PRELUDE.keys()
# Functions the CUDA headers declare, each also with an f or an l at its end: CUDA Math API, libc.
LIBRARY = frozenset(
    "acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh cospi cyl_bessel_i0 "
    "cyl_bessel_i1 erf erfc erfcinv erfcx erfinv exp exp10 exp2 expm1 fabs fdim fdivide floor fma "
    "fmax fmin fmod frexp hypot ilogb isfinite isinf isnan j0 j1 jn ldexp lgamma llrint llround "
    "log log10 log1p log2 logb lrint lround max min modf nan nearbyint nextafter norm norm3d "
    "norm4d normcdf normcdfinv pow rcbrt remainder remquo rhypot rint rnorm rnorm3d rnorm4d round "
    "rsqrt saturate scalbln scalbn signbit sin sincos sincospi sinh sinpi sqrt tan tanh tgamma "
    "trunc y0 y1 yn abs labs llabs div abort assert clock clock64 exit free main malloc memcpy "
    "memset printf".split()
)
_DERIVED = re.compile(rf"({'|'.join(SUFFIXES)}|_map\d*|_stride\d+|_|^__.*)$")
_MADE = re.compile(r"^(wgmma|tma|pack|half|read|write|registers|barrier|next)_")


def c_name(name: str) -> str:
    """The C++ identifier of a dimension, index, tile variable or scalar."""
    clash = name in RESERVED or _DERIVED.search(name) or _MADE.match(name)
    return f"{name}_" if clash else name


def kernel_name(program: str) -> str:
    """The symbol of a program's kernel: its name, or one that no header has declared already."""
    known = program in LIBRARY or (program[-1:] in ("f", "l") and program[:-1] in LIBRARY)
    return f"{program}_kernel" if known or c_name(program) != program else program
