"""Which function makes which table. To add one: a function of a `Study`, its line here, its entry in papers.json."""

from __future__ import annotations

import torch

from . import activations, cards, predictors, quality, speeds
from .papers import Made
from .study import Study

MAKERS = {**quality.MAKERS, **activations.MAKERS, **predictors.MAKERS, **speeds.MAKERS, **cards.MAKERS}


def make(name: str, study: Study) -> Made:
    """Make one of `papers.entries`.

    Raises:
        UsageError: the pack, or what was given with it, does not allow it. PackError, CheckpointError: damaged files.
    """
    with torch.inference_mode():
        return MAKERS[name](study)
