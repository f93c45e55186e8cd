"""`python -m experiments`."""

import os
import signal
import sys

if __name__ == "__main__":
    # Until the command line takes over, the keyboard ends this without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from experiments.cli import interrupted, main

    status = main()
    if status in (interrupted(signal.SIGINT), interrupted(signal.SIGTERM)):
        os._exit(status)  # all is said and written; nothing that a library left behind shall hold it up
    sys.exit(status)
