"""Operands of PTX instructions as C++, and the instruction that has them."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.errors import InputError

TYPES = {
    "pred": "bool", "b8": "uint8_t", "u8": "uint8_t", "s8": "int8_t", "b16": "uint16_t",
    "u16": "uint16_t", "s16": "int16_t", "f16": "uint16_t", "bf16": "uint16_t", "b32": "uint32_t",
    "u32": "uint32_t", "s32": "int32_t", "f16x2": "uint32_t", "bf16x2": "uint32_t",
    "f32": "float", "b64": "uint64_t", "u64": "uint64_t", "s64": "int64_t", "f64": "double",
}  # fmt: skip
SPECIAL = {
    "tid.x": "threadIdx.x", "tid.y": "threadIdx.y", "tid.z": "threadIdx.z",
    "ntid.x": "blockDim.x", "ctaid.x": "blockIdx.x", "ctaid.y": "blockIdx.y",
    "ctaid.z": "blockIdx.z", "nctaid.x": "gridDim.x", "nctaid.y": "gridDim.y",
    "laneid": "ptx::lane()", "warpid": "ptx::warp()", "smid": "blockIdx.x",
    "lanemask_gt": "(~1u << ptx::lane())", "lanemask_le": "~(~1u << ptx::lane())",
    "cluster_ctarank": "machine::rank_in_cluster()",
    "cluster_ctaid.x": "machine::rank_in_cluster()",
    "cluster_nctarank": "machine::blocks_of_cluster()",
    "cluster_nctaid.x": "machine::blocks_of_cluster()",
    "clusterid.x": "(blockIdx.x / machine::blocks_of_cluster())",
    "nclusterid.x": "(gridDim.x / machine::blocks_of_cluster())",
    "clock": "machine::now()", "clock64": "machine::now()", "globaltimer": "machine::now()",
}  # fmt: skip
KINDS = {"bf16": "kBf16", "f16": "kFp16", "e4m3": "kE4m3", "e5m2": "kE5m2", "tf32": "kTf32"}


def c_type(name: str) -> str | None:
    """The C++ type of a PTX type."""
    return TYPES.get(name)


@dataclass(frozen=True)
class Operand:
    """One operand: bound to C++, a register, a number, a vector, an address, or none (`_`)."""

    kind: str
    text: str = ""
    parts: tuple[Operand, ...] = ()
    written: bool = False

    def value(self, kind: str) -> str:
        """The operand as C++ of that type."""
        if self.kind == "special":
            if self.text not in SPECIAL:
                raise InputError(f"PTX register %{self.text} is not in the emulated subset")
            return f"{kind}({SPECIAL[self.text]})"
        if self.kind == "number":
            return f"{kind}({self.text})"
        if self.kind not in ("bound", "register"):
            raise InputError(f"a PTX {self.kind} stands where a value is expected")
        return f"ptx::as<{kind}>({self.text})"

    def set(self, value: str) -> str:
        """C++ that writes it."""
        if self.kind == "sink":
            return f"{value};"
        if not self.written:
            raise InputError("PTX writes an operand that is not an output")
        return f"ptx::put({self.text}, {value});"

    def address(self, kind: str = "uint32_t") -> str:
        """An address without coordinates."""
        if self.kind != "address":
            raise InputError("PTX has no address where one is expected")
        return f"{self.parts[0].value(kind)}{self.text}"


@dataclass(frozen=True)
class Call:
    """An instruction: the groups of its pattern, its operands, whether it stands in a kernel."""

    groups: tuple[str, ...]
    ops: list[Operand]
    kernel: bool

    def u32(self, at: int) -> str:
        """Operand `at` as an unsigned number."""
        return self.ops[at].value("uint32_t")

    def mem(self, at: int, kind: str = "uint32_t") -> str:
        """Operand `at` as an address."""
        return self.ops[at].address(kind)
