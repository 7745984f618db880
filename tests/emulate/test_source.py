"""CUDA C++ as C++: asm statements, shared arrays, launches; what is not known is refused."""

import pytest

from warploom.emulate.asm import asm_as_calls
from warploom.emulate.source import as_cpp
from warploom.errors import InputError


def calls(template, *operands):
    """The translation of one asm statement in a device function."""
    return asm_as_calls(f"void f() {{\n  asm volatile({template}{''.join(operands)});\n}}", "k.cu")


def test_strings_operands_and_offsets_become_calls():
    text = calls('"st.shared::cta.v2.f32 [%0 + 16], " "{%1, %2};"', ' :: "r"(at), "f"(x), "f"(y)')
    assert "auto&& o0 = (at);" in text
    assert "{ptx::as<float>(o1), ptx::as<float>(o2)}" in text
    assert "machine::shared_write(ptx::as<uint32_t>(o0) + (int(16)), x_, sizeof x_)" in text


def test_names_registers_predicates_and_labels():
    text = calls(
        r'"{ .reg .pred p;\n AGAIN: mbarrier.test_wait.parity.shared.b64 p, [%[bar]], 1;\n"'
        r' "@!p bra AGAIN; }"',
        ' :: [bar] "r"(b)',
    )
    assert "bool r_p;" in text and "ptx_0_AGAIN:;" in text
    assert "if (!ptx::as<bool>(r_p)) goto ptx_0_AGAIN;" in text
    assert "ptx::put(r_p, machine::mbarrier_test(ptx::as<uint32_t>(o0), uint32_t(1)));" in text


def test_lines_stay_where_they_are():
    source = 'void f() {\n  asm volatile(\n    "bar.sync %0, %1;"\n    :: "n"(1), "n"(128));\n}\n'
    text = asm_as_calls(source, "k.cu")
    assert text.count("\n") == source.count("\n") and text.endswith("\n}\n")


def test_macros_bring_operands():
    source = (
        '#define TWO(d) "=f"(d[0]), \\\n  "=f"(d[1])\n'
        'void f() { asm("ld.shared.v2.f32 {%0, %1}, [%2];" : TWO(x) : "r"(at)); }'
    )
    text = asm_as_calls(source, "k.cu")
    assert "auto&& o0 = (x[0]);" in text and "auto&& o1 = (x[1]);" in text


def test_statements_without_text_and_in_comments_are_nothing():
    assert "machine::" not in calls('""', ' : "+f"(x) :: "memory"')
    comment = '// asm("nonsense;");\nconst char* s = "asm(\\"x;\\")";'
    assert asm_as_calls(comment, "k.cu") == comment


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ('"discard.global.L2 [%0], 128;" :: "l"(p)', r"k\.cu:2: PTX instruction 'discard"),
        ('"bar.sync %1;" :: "r"(x)', r"k\.cu:2: asm operand %1 of 1"),
        ('"bar.sync %0" :: "r"(x)', r"k\.cu:2: PTX without a semicolon"),
        ('TEXT :: "r"(x)', r"k\.cu:2: asm text that is no string: 'TEXT'"),
        ('"mov.u32 %0, %%nonsense;" : "=r"(x)', r"k\.cu:2: PTX register %nonsense"),
        ('"mov.u32 %0, 1;" :: "r"(x)', r"k\.cu:2: PTX writes an operand that is not an output"),
        ('"bar.sync;"', r"k\.cu:2: bar\.sync has 0 operands"),
        (
            '"wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%0}, %1, %2, 1, 1, 1, 0, 0;"'
            ' : "+r"(x) : "l"(a), "l"(b)',
            r"k\.cu:2: PTX instruction 'wgmma",
        ),
    ],
)
def test_what_is_not_known_is_refused_with_its_line(statement, words):
    with pytest.raises(InputError, match=words):
        calls(statement)


def test_shared_arrays_launches_and_clusters():
    text = as_cpp(
        "#include <cuda_bf16.h>\n"
        "template <int n> __global__ void __cluster_dims__(2, n) k(int m) {\n"
        "  extern __shared__ __align__(16) unsigned char raw[];\n"
        "  __shared__ alignas(8) float a[n][4], b;\n"
        "}\n"
        "int main() { k<2><<<dim3(4, 2), 64>>>(7); }\n",
        "k.cu",
    )
    assert "machine::begin(int(2) * int(n));" in text
    assert "unsigned char* const raw = (unsigned char*)machine::own_shared();" in text
    assert "typedef float a_of_shared[n][4];" in text and "auto& b = *(b_of_shared*)" in text
    assert "k<2> * cuda_launch(dim3(4, 2), 64) % cuda_arguments(7);" in text
    assert "#include" not in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("#include <cuda/barrier>", r"k\.cu:2: #include of cuda/barrier"),
        ('#include "mine.cuh"', r"k\.cu:2: #include of mine\.cuh"),
        ("cuda::barrier<int> b;", r"k\.cu:2: cuda:: is a library"),
        ("using namespace cute::x;", r"k\.cu:2: cute:: is a library"),
    ],
)
def test_libraries_are_refused(line, words):
    with pytest.raises(InputError, match=words):
        as_cpp(f"// a file\n{line}\n", "k.cu")
