"""The conditions of a measurement: threads, kernels, and the machine's identity."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...kernels import operations as kernels
from ...kernels.cpu import native
from ...models.errors import FloeError, UsageError
from . import hardware


@contextmanager
def computing(threads: int | None, hidden: int, neurons: int) -> Generator[int]:
    """Let torch compute on `threads` (None: as many as the engine would use); yields their number.

    Raises:
        UsageError: more threads than cores.
    """
    threads, before = threads_for(threads, hidden, neurons), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)


def threads_for(wanted: int | None, hidden: int, neurons: int) -> int:
    """How many threads compute experts of this size: the requested number, or as many as the engine would use.

    Raises:
        UsageError: more threads than cores.
    """
    threads, cores = wanted or hardware.choose_threads(hidden, neurons)[0], hardware.probe(Path.cwd()).cores_usable
    if threads > cores:
        has = f"This process may use {cores}."
        raise UsageError(f"There are no cores for {threads} threads", has, "Give --threads a smaller number.")
    return threads


def cpu() -> str:
    """Its name."""
    return hardware.probe(Path.cwd()).cpu


def backend(device: str) -> kernels.Backend:
    """The kernels of a device ("cpu", "cuda:0").

    Raises:
        FloeError: kernels that were forced and cannot run.
    """
    try:
        return kernels.choose(device)
    except native.NativeUnavailableError as error:
        raise FloeError("The CPU kernels cannot run", f"{error}.", "Unset FLOE_CPU_ISA.") from error


def facts(chosen: kernels.Backend, **more: str | int) -> dict[str, str | int]:
    """The facts about the machine in every table, followed by `more`."""
    return {"kernels": chosen.name, "reason": chosen.reason, "cpu": cpu(), **more}
