"""Triton and warploom, with no fork: capture a kernel for offline search, run the result by key.

    from warploom.integrations.triton import capture, tuned, install

    @tuned(store="tuned/", on_miss="original")
    @triton.jit
    def kernel(...): ...

Importing this brings in no search code; a launch of a tuned function is a launch of Triton's own.
"""

from __future__ import annotations

from warploom.integrations.deploy import FolderStore, Manifest, Store, content_key
from warploom.integrations.triton_capture import (
    CapturedKernel,
    ScalarArgument,
    TensorArgument,
    capture,
    capture_call,
)
from warploom.integrations.triton_swap import (
    KernelNotStored,
    Swap,
    events,
    install,
    swap,
    tuned,
    uninstall,
)

__all__ = [
    "CapturedKernel",
    "FolderStore",
    "KernelNotStored",
    "Manifest",
    "ScalarArgument",
    "Store",
    "Swap",
    "TensorArgument",
    "capture",
    "capture_call",
    "content_key",
    "events",
    "install",
    "swap",
    "tuned",
    "uninstall",
]
