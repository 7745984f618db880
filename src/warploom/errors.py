"""The errors a user can meet, and the exit code each one means.

`InputError` is for anything the caller can mend: it is one line that names the input, what was
expected and the fix, and the command line turns it into exit code 2. `CheckFailed` is an answer,
not a fault: the work was done and a check said no (exit code 1).
"""

from __future__ import annotations

MISSING = "install it with: "  # what every refusal for want of a tool says, before the command


class WarploomError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 2


class InputError(WarploomError):
    """The input cannot be used: names the offending value, the rule and the nearest fix."""


class DoesNotFit(InputError):
    """The GPU has too little shared memory or too few threads for a kernel with these tiles."""


class ToolMissing(InputError):
    """An external tool or an optional package is absent or too old; carries the install line."""


class DeviceError(WarploomError):
    """The GPU or its driver refused or failed (image not loadable, launch fault, time-out)."""


class Interrupted(WarploomError):
    """Ctrl-C, with what was kept."""

    exit_code = 130


class WarploomWarning(UserWarning):
    """Something a user should know of that does not stop the work; the command line says it in one
    line."""


class CheckFailed(WarploomError):
    """A verification said no. The message is the first finding, in words."""

    exit_code = 1


class Spills(CheckFailed):
    """The GPU has too few registers for a kernel with these tiles."""
