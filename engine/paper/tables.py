"""Which function makes which table. To add one: a function of a `Study`, its line here, its entry in papers.json."""

from __future__ import annotations

from dataclasses import replace

import torch

from . import activations, cards, predictors, quality, speeds
from .papers import Made
from .study import Study

MAKERS = {**quality.MAKERS, **activations.MAKERS, **predictors.MAKERS, **speeds.MAKERS, **cards.MAKERS}

# What tables read of what a person may give; the others say that it has no effect.
_SOURCE = {*quality.MAKERS, *activations.MAKERS, "corm-t1"} - {"dualsparse-f11"}
_WIDTH = {*cards.MAKERS, "floe-t1", "floe-f7", "corm-f9", "fiddler-f3"}
_CARD = {*cards.MAKERS, "corm-f9", "fiddler-f3", "importance-f6", "importance-f8"}


def make(name: str, study: Study) -> Made:
    """Make one of `papers.entries`.

    Raises:
        UsageError: the pack, or what was given with it, does not allow it. PackError, CheckpointError: damaged files.
    """
    given = (
        ("--source", study.source, _SOURCE),
        ("--card", study.card, _CARD),
        ("--synthetic", study.synthetic, _WIDTH),
    )
    idle = [f"{option} has no effect on this table." for option, value, tables in given if value and name not in tables]
    with torch.inference_mode():
        made = MAKERS[name](study)
    return replace(made, notes=(*made.notes, *idle))
