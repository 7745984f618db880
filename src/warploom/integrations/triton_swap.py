"""Running stored cubins in place of Triton's own, with no fork and nothing on the launch path.

Where the swap happens: right after `JITFunction` has compiled a kernel (or found it in Triton's
disk cache) and before anything is loaded on the GPU, the bytes in the `CompiledKernel` are
replaced. Launches after that are Triton's own, untouched, and so is Triton's disk cache.

Why not Triton's hooks (read in the sources of 3.6.0, 3.7.0, 3.7.1, 3.8.0, 3.9.0): the stage
inspection hook is part of no cache key in 3.6, so that a kernel cached earlier is never offered to
it and a swapped one outlives it in the user's cache; from 3.7 on it is called at every launch.
`jit_post_compile_hook` serialises all constants as JSON first and so breaks kernels that it has
nothing to do with (any with a tuple of types, for one). `JITFunction._do_compile` has one meaning
in all of these versions; `check_triton` says so in one line when it is gone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from warploom.errors import InputError, ToolMissing
from warploom.integrations.deploy import FolderStore, Store, check_replaces, content_key
from warploom.integrations.triton_access import jit_function, triton_module

OnMiss = Literal["original", "raise"]
Outcome = Literal["swapped", "original", "refused"]
Function = TypeVar("Function")
POLICY_ATTRIBUTE = "_warploom_policy"
PATCH_ATTRIBUTE = "_warploom_original"
SWAP_ATTRIBUTE = "_warploom_swap"
MISS_CHOICES = ("original", "raise")


class KernelNotStored(InputError):
    """The store has no cubin for this kernel and `on_miss="raise"` was asked for."""


@dataclass(frozen=True)
class Policy:
    """Where tuned cubins are looked up and what a miss means."""

    store: Store
    on_miss: OnMiss


@dataclass(frozen=True)
class Swap:
    """What happened to one compiled kernel: its deploy key and whether a stored cubin runs."""

    kernel: str
    key: str
    outcome: Outcome
    reason: str = ""


_installed: list[Policy] = []
_events: list[Swap] = []


def tuned(
    store: Store | Path | str, on_miss: OnMiss = "original"
) -> Callable[[Function], Function]:
    """Decorator over `@triton.jit` (or `@triton.autotune`): run stored cubins for this function.

    The function itself is returned, so launching costs what it cost before. Under the autotuner
    each configuration is timed with its stored cubin; with `on_miss="raise"` configurations that
    are not stored are skipped, and `KernelNotStored` is raised when none is left. A stored cubin
    that cannot be trusted is refused: with one warning and the original under "original", with
    `InputError` under "raise".
    """
    policy = make_policy(store, on_miss)

    def decorate(function: Function) -> Function:
        if type(function).__module__.startswith("triton.runtime.interpreter"):
            return function  # TRITON_INTERPRET=1: there is no cubin
        inner = jit_function(function)
        if any(cache[0] for cache in inner.device_caches.values()):
            raise InputError(
                f"{inner.__name__} has already been launched; decorate it before its first launch"
            )
        patch_triton()
        setattr(inner, POLICY_ATTRIBUTE, policy)
        return function

    return decorate


def install(store: Store | Path | str, on_miss: OnMiss = "original") -> None:
    """Look up every kernel loaded from now on: warploom's own, and Triton's where it is installed.

    `tuned` functions keep their own store.
    """
    policy = make_policy(store, on_miss)
    _replace_images(functools.partial(stored_image, policy))
    if importlib.util.find_spec("triton") is not None:
        patch_triton()
    _installed[:] = [policy]


def uninstall() -> None:
    """Undo `install`: kernels loaded from now on are as their compiler made them."""
    _installed.clear()
    _replace_images(None)


def _replace_images(lookup: Callable[[str, bytes], bytes] | None) -> None:
    # Not at the top: a launch of a tuned Triton function needs nothing of the runtime.
    from warploom.runtime.kernel import replace_images  # noqa: PLC0415

    replace_images(lookup)


def stored_image(policy: Policy, name: str, original: bytes) -> bytes:
    """The stored cubin for a kernel of warploom's own, else what the policy says of a miss."""
    return look_up(policy, name, original, KernelNotStored)[1]


def look_up(
    policy: Policy, name: str, original: bytes, failure: Callable[[str], KernelNotStored]
) -> tuple[Swap, bytes]:
    """What happens to a compiled kernel, which is recorded, and the cubin that is to run.

    A stored cubin that cannot be trusted is an error under "raise", else one warning.
    """
    key = content_key(original)
    try:
        stored = policy.store.lookup(key)
        if stored is not None:
            check_replaces(original, stored, name)
    except InputError as error:
        event = record(Swap(name, key, "refused", str(error)))
        if policy.on_miss == "raise":
            raise failure(f"{name}: stored cubin refused: {error}") from None
        warnings.warn(f"warploom runs the original {name}: {error}", RuntimeWarning, stacklevel=3)
        return event, original
    if stored is not None:
        return record(Swap(name, key, "swapped")), stored
    event = record(Swap(name, key, "original", "not stored"))
    if policy.on_miss == "raise":
        raise failure(
            f"{name}: no tuned cubin is stored under key {key}; run warploom tune on this kernel "
            'as it is built here, or use on_miss="original"'
        )
    return event, original


def events() -> tuple[Swap, ...]:
    """What happened so far to every kernel that was looked up, in order."""
    return tuple(_events)


def make_policy(store: Store | Path | str, on_miss: OnMiss) -> Policy:
    """A policy from what the user gave; a path means a folder of entries, which must exist."""
    if on_miss not in MISS_CHOICES:
        raise InputError(f"on_miss={on_miss!r}, expected one of {MISS_CHOICES}")
    if not isinstance(store, (str, Path)):
        return Policy(store, on_miss)
    folder = Path(store)
    if not folder.is_dir():
        raise InputError(f"store {folder}: no such folder, expected one written by warploom tune")
    return Policy(FolderStore(folder), on_miss)


def patch_triton() -> None:
    """Let every `JITFunction` offer what it compiled to `swap_compiled`; does nothing twice."""
    cls = check_triton()
    original = cls._do_compile
    if hasattr(original, PATCH_ATTRIBUTE):
        return

    @functools.wraps(original)
    def compile_and_swap(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = original(self, *args, **kwargs)
        policy = policy_of(self)
        if compiled is None or policy is None:
            return compiled
        return offer(self, compiled, policy)

    setattr(compile_and_swap, PATCH_ATTRIBUTE, original)
    cls._do_compile = compile_and_swap


def check_triton() -> Any:
    """`JITFunction`; raises `ToolMissing` when this Triton has no `_do_compile` to build on."""
    triton = triton_module()
    cls: Any = importlib.import_module("triton.runtime.jit").JITFunction
    if not callable(getattr(cls, "_do_compile", None)):
        raise ToolMissing(
            f"triton {triton.__version__} has no JITFunction._do_compile, which swapping cubins "
            "builds on; use triton 3.6 to 3.9"
        )
    return cls


def policy_of(function: Any) -> Policy | None:
    """The function's own policy, else the installed one."""
    own: Policy | None = getattr(function, POLICY_ATTRIBUTE, None)
    return own or (_installed[0] if _installed else None)


def offer(function: Any, compiled: Any, policy: Policy) -> Any:
    """Swap a compiled kernel now, or when it is ready if it compiles in the background.

    A kernel that may not run is taken out of the function's cache, so that the next launch fails
    in the same way and does not find the original there.
    """
    if not hasattr(compiled, "finalize_compile"):
        try:
            swap(compiled, policy.store, policy.on_miss)
        except InputError:
            forget(function, compiled)
            raise
        return compiled
    finalize = compiled.finalize_compile

    def swap_then_finalize(kernel: Any) -> Any:
        swap(kernel, policy.store, policy.on_miss)
        return finalize(kernel)

    compiled.finalize_compile = swap_then_finalize
    return compiled


def forget(function: Any, compiled: Any) -> None:
    """Remove a kernel from the function's in-memory caches."""
    for kernels, *_ in function.device_caches.values():
        for key in [key for key, kernel in kernels.items() if kernel is compiled]:
            del kernels[key]


def swap(compiled: Any, store: Store | Path | str, on_miss: OnMiss = "original") -> Swap:
    """Replace the cubin inside one `CompiledKernel` (of `triton.compile`) by the stored one.

    Call it before the kernel's first launch. Raises as `tuned` says.
    """
    policy = make_policy(store, on_miss)
    if done := getattr(compiled, SWAP_ATTRIBUTE, None):
        return done
    if compiled.module is not None:
        raise InputError(
            f"{compiled.name} is already loaded on the GPU; swap before its first launch"
        )
    event, cubin = look_up(policy, compiled.name, bytes(compiled.asm["cubin"]), skippable)
    if event.outcome == "swapped":
        compiled.kernel = cubin
        compiled.asm["cubin"] = cubin
        compiled.asm.pop("sass", None)
        setattr(compiled, SWAP_ATTRIBUTE, event)
    return event


def skippable(message: str) -> KernelNotStored:
    """The error as one that Triton's autotuner takes for a configuration that does not compile."""
    failed: type[Exception] = importlib.import_module("triton.runtime.errors").PTXASError

    class NotStored(KernelNotStored, failed):
        def __str__(self) -> str:
            return message

    return NotStored(message)


def record(event: Swap) -> Swap:
    """Keep an event for `events`."""
    _events.append(event)
    return event
