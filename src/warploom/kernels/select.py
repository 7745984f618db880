"""The one chooser: the kernel that a program gets for sizes on a GPU.

`build`, `run`, `optimize`, `tune` and the operators all ask here. By policy:

    default   a kernel of the library on Hopper: the variant of its tuned table for the sizes; any
              other program: the named schedule that suits its loops
    a name    that of `autosched.schedules`, for the program as it was written
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from warploom.autosched.schedules import NAMES, Policy, fitting_name, schedule_for
from warploom.autosched.selected import HOPPER, Selected
from warploom.autosched.solve import Search
from warploom.codegen.compile.build import BUILD_ARCHITECTURES
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.kernels.library import Entry, configure, entry
from warploom.kernels.older import older_kernel
from warploom.tile import Program

DEFAULT = "default"


def select(
    name: str,
    settings: Mapping[str, str],
    gpu: str = "h200",
    policy: str = DEFAULT,
    search: Search | None = None,
    allow: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Selected:
    """The kernel `name` (of the library, or FILE.py:OBJECT) under `key=value` settings.

    Sizes that the settings do not give are those of `Entry.full`. A field of the configuration that
    they give is kept; if no variant has it, the kernel gets the textbook schedule. GPUs before
    Hopper get the largest tile that they hold (`kernels.older`); the compiler's faults in `allow`
    are accepted. `say` is called with tiles that are not taken and the progress of a solver. Raises
    `InputError` for an unknown GPU, policy or setting.
    """
    if gpu not in BUILD_ARCHITECTURES:
        raise InputError(f"--gpu {gpu!r}: code is emitted for {', '.join(BUILD_ARCHITECTURES)}")
    if policy not in (DEFAULT, *NAMES):
        raise InputError(f"--schedule {policy!r}: expected {DEFAULT} or one of {', '.join(NAMES)}")
    kernel, arch = entry(name), BUILD_ARCHITECTURES[gpu]
    config, _ = configure(name, settings)
    if policy == DEFAULT:
        sizes = full_sizes(name, settings)
        return suited(kernel, config, sizes, frozenset(settings), gpu, allow, say)
    program, launch = written(name, settings)
    if arch != HOPPER and fitting_name(program):
        return older_kernel(kernel, config, arch, policy, allow, "tile" in settings, say)
    asked = Policy(policy, launch, search=search)
    return Selected(policy, config, program, schedule_for(program, asked, gpu, arch, say), arch)


def written(name: str, settings: Mapping[str, str]) -> tuple[Program, LaunchPlan]:
    """The program as it was written, and its usual launch plan: what a schedule is named for."""
    kernel, (config, _) = entry(name), configure(name, settings)
    return kernel.program(config), kernel.policy(config).launch


def full_sizes(name: str, settings: Mapping[str, str]) -> dict[str, int]:
    """Array sizes to choose and to time a kernel for: those given, others fill the GPU."""
    return configure(name, settings, entry(name).full)[1]


def check_sizes(name: str, settings: Mapping[str, str]) -> dict[str, int]:
    """Array sizes to check a kernel at: those given, but none above what `run` takes by itself."""
    kernel = entry(name)
    fields = {key: text for key, text in settings.items() if key in kernel.settings}
    usual, given = configure(name, fields)[1], configure(name, settings)[1]
    return {dim: min(size, given[dim]) for dim, size in usual.items()}


def suited(
    kernel: Entry,
    config: Any,
    sizes: Mapping[str, int],
    given: frozenset[str],
    gpu: str = "h200",
    allow: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Selected:
    """What a kernel gets for sizes where no schedule is named; `given` names the settings that are
    to be kept."""
    arch = BUILD_ARCHITECTURES[gpu]
    if arch != HOPPER and fitting_name(kernel.program(config)):
        # The default of a program is made for Hopper: elsewhere loads run ahead and matmuls do not.
        return older_kernel(kernel, config, arch, "lcsf", allow, "tile" in given, say)
    variant = kernel.variant(config, sizes, given) if arch == HOPPER else None
    if variant is not None:
        return variant.selected(config)
    program = kernel.program(config)
    schedule = schedule_for(program, kernel.policy(config), gpu, arch, say)
    return Selected(schedule.name, config, program, schedule, arch)
