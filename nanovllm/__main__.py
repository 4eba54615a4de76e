"""The command `nanovllm`, also `python -m nanovllm`: what a process needs before it runs `nanovllm.jobs.cli.main`.

Nothing else is imported before the `try`, so that Ctrl-C during the imports, which take seconds, ends as it does later.
"""

import os
import signal
import sys
from typing import Any


def main() -> int:
    """Runs the command, and returns its exit status; `nanovllm.jobs.cli.Exit` describes it."""
    for kind in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(kind) is not signal.SIG_IGN:  # a shell's background job ignores SIGINT
            signal.signal(kind, _interrupted)
    try:
        _open_closed_streams()
        from nanovllm.jobs.cli import main

        return main()
    except KeyboardInterrupt:
        print("nanovllm: stopped", file=sys.stderr)
        return 128 + signal.SIGINT


def _interrupted(number: int, frame: Any) -> None:
    """Interrupts the command. A second signal ends the process at once, because an exception during the exit would show
    a traceback."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def _open_closed_streams() -> None:
    """Opens the null device for each standard stream that is closed. Otherwise the next file that is opened would take
    its place."""
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


if __name__ == "__main__":
    sys.exit(main())
