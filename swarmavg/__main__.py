"""``python -m swarmavg`` is the command ``swarmavg``."""

from swarmavg.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
