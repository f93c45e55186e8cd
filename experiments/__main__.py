"""`python -m experiments`, and the command `gpipe-bench`."""

import os
import signal
import sys


def command() -> None:
    """Runs the command line and ends the process with its status."""
    # Until the command line takes over, the keyboard ends this without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from gpipe_bench.experiments.commands.cli import main
    from gpipe_bench.experiments.commands.output import interrupted

    status = main()
    if status in (interrupted(signal.SIGINT), interrupted(signal.SIGTERM)):
        os._exit(status)  # all is said and written; nothing that a library left behind shall hold it up
    sys.exit(status)


if __name__ == "__main__":
    command()
