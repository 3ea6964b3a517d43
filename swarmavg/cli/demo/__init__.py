"""``swarmavg demo``: peers in processes of their own train one model on skewed shares of real data, and a verdict is given.

This process trains nothing: it starts the peers (`worker`), shows what they report (`table`) and judges (`verdict`).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
from collections.abc import Callable

from swarmavg.cli.interface import Subparsers
from swarmavg.cli.signals import sigterm_as_ctrl_c
from swarmavg.errors import AddressError, SwarmError
from swarmavg.transport.registry import ENTRY_POINTS, known_schemes

MAX_PEERS = 16


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "demo",
        help="train one model with several peers on this machine",
        description="Start peers as processes of this machine. Each trains on handwritten digits, sees few of the ten, and "
        "averages with the others over the loopback network. Exit status 0 if all peers end with identical parameters and the "
        "averaged model is clearly better than the best that a peer learns alone, else 1.",
    )
    parser.add_argument("--peers", type=_whole(2, MAX_PEERS), default=4, help="number of peers (default: %(default)s)")
    parser.add_argument(
        "--steps",
        type=_whole(1),
        default=200,
        help="optimizer steps of each peer (default: %(default)s); below about 40 the model has learned too little to pass",
    )
    parser.add_argument("--seed", type=_whole(0, 2**31), default=0, help="of model, shares and batches (default: %(default)s)")
    parser.add_argument("--transport", metavar="SCHEME", default="tcp", help="how peers talk (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="print lines, no live table; so it is too without a terminal")
    return parser


def run(args: argparse.Namespace) -> int:
    _check_extras()
    _check_scheme(args.transport)
    from swarmavg.cli.demo import session, table, verdict  # noqa: PLC0415  (imports stay out of --help)
    from swarmavg.cli.demo.children import ChildFailedError  # noqa: PLC0415

    plan = session.Plan(peers=args.peers, steps=args.steps, seed=args.seed, scheme=args.transport)
    print(f"{plan.peers} peers, {plan.steps} steps each, seed {plan.seed}, over encrypted {plan.scheme} on this machine")
    try:
        with sigterm_as_ctrl_c(), table.display(plan, live=not args.plain and sys.stdout.isatty()) as show:
            outcome = asyncio.run(session.conduct(plan, show))
    except ChildFailedError as error:
        print(f"verdict: failed: {error}")
        return 1
    print("\n".join(verdict.summary(outcome)))
    failures = verdict.failures(outcome)
    print(f"verdict: failed: {'; '.join(failures)}" if failures else f"verdict: passed: {verdict.praise(outcome)}")
    return 1 if failures else 0


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number within bounds."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {number}")
        return number

    parse.__name__ = "whole number"
    return parse


def _check_extras() -> None:
    missing = [package for package in ("rich", "sklearn") if importlib.util.find_spec(package) is None]
    if missing:
        raise SwarmError(f"the demo needs {' and '.join(missing)}: pip install 'swarmavg[demo]'")


def _check_scheme(scheme: str) -> None:
    if scheme not in known_schemes():
        raise AddressError(f"no transport {scheme!r}; installed (entry points {ENTRY_POINTS}): {', '.join(known_schemes())}")
