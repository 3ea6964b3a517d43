"""``swarmavg token``: prints a fresh swarm token, and nothing else, so that the output can go straight into a file."""

from __future__ import annotations

import argparse
import sys

from swarmavg.cli.interface import Subparsers

_ADVICE = "Give it to every peer of the swarm as token=..., and keep it from everybody else: who has it is a member."


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    return subparsers.add_parser(
        "token",
        help="print a fresh token, the secret that makes a swarm",
        description=f"Print a fresh token, the secret that makes a swarm. {_ADVICE}",
    )


def run(_args: argparse.Namespace) -> int:
    from swarmavg.security.tokens import generate_token  # noqa: PLC0415  (imports stay out of --help)

    print(generate_token())
    if sys.stdout.isatty():
        print(_ADVICE, file=sys.stderr)
    return 0
