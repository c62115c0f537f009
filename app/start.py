"""The entry point of the installed command. It imports next to nothing: Ctrl+C finds no program half imported."""

from __future__ import annotations

import os
import signal

from .terminal.interrupts import end_quietly


def command() -> None:
    """Import the program and run it; an interrupt meanwhile ends it as quietly as a later one does."""
    _keep_places()
    # Not where it is ignored, as in the background of a script.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_quietly)
    from .cli import main

    main.command()


def _keep_places() -> None:
    """Let nothing that is opened later take the place of a closed standard stream, and be written to as one."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
