"""The options that the subcommands of `floe-chat bench` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ....models.errors import UsageError

Command = Callable[..., Any]
Option = Callable[[Command], Command]

_RUNS = click.option("--runs", type=click.IntRange(1), help="Timed runs of each figure, after warm-up.  [default: 5]")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print only the JSON object.")
TIMING: tuple[Option, ...] = (
    click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: as many as the engine would use]"),
    _RUNS,
    click.option("--quick", is_flag=True, help="Measure only the defaults: fewer figures."),
    _JSON,
)
WIDTHS = (
    "mixtral-8x7b, qwen3-30b-a3b, gpt-oss-20b, deepseek-v2-lite, qwen3.6-35b-a3b, gemma-4-26b-a4b, lfm2-8b-a1b, "
    "phi-3.5-moe, glm-4.7-flash or qwen3-next-80b-a3b"
)
MODEL: tuple[Option, ...] = (
    click.argument("model", required=False, metavar="[MODEL]"),
    click.option(
        "--synthetic",
        metavar="NAME",
        help=f"Measure random weights of the size of {WIDTHS}.",
    ),
    click.option(
        "--layers", type=int, help="Its number of layers, at least 2.  [default: 3, or two periods of its kinds]"
    ),
    click.option("--up", type=int, help="Bits of its signals: 2, 3, 4, 8 or 16.  [default: as for pack]"),
    click.option("--rows", type=int, help="Bits of its rows: 2, 3, 4, 8 or 16.  [default: as for pack]"),
    click.option("--dense", type=int, help="Bits of its attention: 4, 8 or 16.  [default: as for pack]"),
)


def with_options(*options: Option) -> Option:
    """A decorator that adds all of them, shown in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def chosen_device(wanted: str | None) -> str:
    """ "cuda" where there is one and nothing else was asked for.

    Raises:
        UsageError: a CUDA device was asked for and there is none.
    """
    from ....engine.machine import gpus

    there, reason = gpus.of_torch()
    if wanted == "cuda" and not there:
        raise UsageError("There is no CUDA device to measure", f"On this machine {reason}.", "Use --device cpu.")
    return wanted or ("cuda" if there else "cpu")
