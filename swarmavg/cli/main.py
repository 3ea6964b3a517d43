"""The ``swarmavg`` command: finds the subcommand, runs it, and turns errors of ours into one line and an exit status.

A subcommand is a module of this package that is named in `COMMANDS` and offers what `swarmavg.cli.interface.Command` says.

Exit status: 0 = done, 1 = the command ran and its verdict is no, 2 = wrong usage or an error of ours, 130 = Ctrl-C,
143 = SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import cast

from swarmavg.cli.interface import Command
from swarmavg.errors import SwarmError

COMMANDS: tuple[str, ...] = ("demo", "token")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = _build_parser().parse_args(argv)
    command: Command = args.command
    try:
        return command.run(args)
    except SwarmError as error:
        print(f"swarmavg: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swarmavg", description="Decentralised averaging of PyTorch training state between machines that come and go."
    )
    version = importlib.metadata.version("swarmavg")
    parser.add_argument("--version", action="version", version=f"swarmavg {version}")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for name in COMMANDS:
        command = cast(Command, importlib.import_module(f"swarmavg.cli.{name}"))
        command.add_parser(subparsers).set_defaults(command=command)
    return parser


def _one_line(error: SwarmError) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
