"""The options that set a quality by hand, for the commands that measure one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import click

from ....engine.events import Rule
from ....engine.quality_presets import CUSTOM
from ...text import units
from .comparison import Command

DIALS = {
    "sparsity": "Skip this share of the neurons, those with the weakest signal.",
    "product": "Skip the down half of this share of the neurons.",
    "drop": "Skip experts whose router score is below this share of the mean.",
    "major": "Compute only half of experts whose score is below this share of the mean.",
    "alpha": "Replace experts outside GPU memory by those inside whose score is this close: measured as if those used "
    "last, half of each layer, were inside.",
}
"""What the dial of the chat (F4) sets."""


class Share(click.ParamType[float]):
    """A share from 0 to 1, or in percent."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See click."""
        text = str(value).strip()
        try:
            found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            found = math.nan
        if not 0 <= found <= 1:
            self.fail(f"{text!r} is not a share; give one from 0 to 1, such as 0.6 or 60%.", param, ctx)
        return found


LENIENT = click.option(
    "--lenient",
    is_flag=True,
    help="Measure the most that leaving out weak rows (F4) can cost: none of them is ever in GPU memory.",
)


def with_dials(*names: str) -> Callable[[Command], Command]:
    """A decorator that adds an option for each of these dials, all of them if none is named."""

    def decorate(command: Command) -> Command:
        for name in reversed(names or tuple(DIALS)):
            told = f"{DIALS[name]}  [default: none]"
            command = click.option(f"--{name}", type=Share(), metavar="SHARE", help=told)(command)
        return command

    return decorate


def rule_of(given: Mapping[str, float | None]) -> Rule | None:
    """What these options say, None if none is given."""
    found = {name: share for name in DIALS if (share := given.get(name)) is not None}
    return replace(Rule(), **found) if found else None


def meaning(rule: Rule) -> str:
    """What a quality set by hand is."""
    given = ", ".join(f"{name} {units.share(share)}" for name in DIALS if (share := getattr(rule, name)))
    return f"{CUSTOM}: {given or 'nothing is skipped'}"
