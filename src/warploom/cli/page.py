"""What `--help` of a command prints."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose arguments go by their names, without their Python types, and which ends with
    an example where it has one."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the line of usage; Typer's own have braces."""
        words = [p.metavar for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(word) for word in words)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then options."""
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                kind = param.param_type_name
                name = record[0] if kind == "option" else str(param.metavar)
                rows[kind].append((name, record[1]))
        for kind, found in rows.items():
            if found:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(found)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The example as it is typed, on a line of its own however long."""
        if self.epilog:
            with formatter.section("Example"):
                formatter.write(f"  {self.epilog}\n")
