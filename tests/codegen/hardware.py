"""What Hopper does with descriptors, written from its manual and not from the compiler."""

from warploom.codegen.ir.layout import swizzle

CORE_ROWS, FIELD = 8, 0x3FFF  # rows of a core matrix; descriptor fields hold bytes / 16


def hardware_address(low: int, high: int, k_major: bool, mn: int, k: int, element: int) -> int:
    """The byte address wgmma reads for element (mn, k) of an instruction, from a descriptor.

    From the canonical layouts of the PTX ISA ("Matrix descriptor").
    """
    base = (low & FIELD) << 4
    lbo, sbo = (low >> 16 & FIELD) << 4, (high & FIELD) << 4
    width = {1: 128, 2: 64, 3: 32}[high >> 30]
    per_row = width // element
    if k_major:
        linear = mn // CORE_ROWS * sbo + mn % CORE_ROWS * width + k * element
    else:
        panel, inner = divmod(mn, per_row)
        linear = panel * lbo + k // CORE_ROWS * sbo + k % CORE_ROWS * width + inner * element
    return swizzle(base + linear, width)
