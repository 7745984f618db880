"""Options have the names that pages and examples type, whatever release of typer reads them."""

import inspect
from typing import get_args

import pytest
from typer.main import get_command
from typer.models import OptionInfo

from warploom.cli import app

COMMANDS = ("build", "derive", "export", "judge", "optimize", "schedule", "tune")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_called_as_its_metavar_says_its_name(command):
    """typer 0.27.0 to 0.27.2 take the letters of the metavar else: --GPU."""
    found = get_command(app).get_command(None, command)
    parameters = inspect.signature(found.callback, eval_str=True).parameters
    infos = [(n, x) for n, p in parameters.items() for x in (*get_args(p.annotation), p.default)]
    options = [(name, one) for name, one in infos if isinstance(one, OptionInfo)]
    assert options
    for name, one in options:
        if one.metavar and one.metavar.lower() == name:
            said = (one.default, *(one.param_decls or ()))  # in Annotated the first is `default`
            assert f"--{name}" in said, name
