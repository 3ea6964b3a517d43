"""`swarmavg-bench`: measures one thing per subcommand, rivals alternating with us in the same run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from swarmavg_bench import allreduce


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="swarmavg-bench", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    allreduce.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
