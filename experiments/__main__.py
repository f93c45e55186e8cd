"""`python -m experiments`."""

import sys

from gpipe_bench.experiments.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
