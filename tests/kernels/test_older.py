"""The library's kernels on GPUs before Hopper: the largest tiles that their limits allow."""

import pytest

from warploom.errors import DoesNotFit, InputError, Spills
from warploom.kernels.library import entry
from warploom.kernels.older import older_kernel
from warploom.tile import E4M3

# CUDA C++ Programming Guide, technical specifications: shared memory of a block
SHARED = {"sm_80": 163 * 1024, "sm_86": 99 * 1024}


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize(
    ("name", "settings"),
    [("attention", {}), ("attention", {"head_dim": 256, "causal": True}), ("gemm", {"b": "nk"})],
)
def test_the_default_fits_by_the_limits_of_its_gpu(arch, name, settings):
    kernel = entry(name)
    asked = kernel.config(**settings)
    refused = []
    found = older_kernel(kernel, asked, arch, say=refused.append)
    built = found.build()  # refuses spills
    assert built.source.shared_bytes <= SHARED[arch]
    assert (found.config == asked) == (not refused)
    assert all(arch in text and "232,448" not in text for text in refused)


def test_a_gemm_needs_no_smaller_tile_where_its_columns_are_contiguous_in_depth():
    """The offsets of all blocks of b share registers: a table of them would spill."""
    kernel = entry("gemm")
    asked = kernel.config(b="nk")
    found = older_kernel(kernel, asked, "sm_80")
    assert found.config.tile == asked.tile == (128, 256, 64)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, Spills, "its 384 threads have 168 each on sm_80; make its tile smaller, or allow"),
        ({"head_dim": 256}, DoesNotFit, r"needs 328,784 B .*, sm_80 has 166,912"),
    ],
)
def test_a_tile_that_was_asked_for_is_kept_and_refused_by_name(settings, error, message):
    kernel = entry("attention")
    asked = kernel.config(**settings)
    with pytest.raises(error, match=message):
        found = older_kernel(kernel, asked, "sm_80", fixed=True)
        assert found.config == asked
        found.build()


def test_what_no_tile_would_mend_is_refused_at_once():
    kernel = entry("gemm")
    refused = []
    with pytest.raises(InputError, match="multiplies bf16 and fp16"):
        older_kernel(kernel, kernel.config(dtype=E4M3, b="nk"), "sm_80", say=refused.append)
    assert not refused
