"""What the module of a subcommand offers to `swarmavg.cli.main`."""

from __future__ import annotations

import argparse
from typing import Protocol, TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001  (argparse has no public name)


class Command(Protocol):
    """A subcommand. Imports that only it needs belong inside `run`."""

    def add_parser(self, subparsers: Subparsers) -> argparse.ArgumentParser:
        """Add the parser of this command, with its arguments, and return it."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit status. A `SwarmError` becomes one line on stderr and status 2."""
