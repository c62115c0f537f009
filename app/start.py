"""The entry point of the installed command. It imports next to nothing: Ctrl+C finds no program half imported."""

from __future__ import annotations

import os
import signal

from .terminal.interrupts import end_quietly


def command() -> None:
    """Import the program and run it; an interrupt during the import ends it as quietly as a later one."""
    _keep_places()
    # Unless interrupts are ignored, as in a script's background jobs.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_quietly)
    from .cli import main

    main.command()


def _keep_places() -> None:
    """Keep files opened later from getting the descriptor of a closed standard stream."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
