"""What is wrong with a checkpoint of LFM2 is said before anything is packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.models.catalog import described
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import CheckpointError
from floe_chat.models.packing.dense_part import DensePart
from torch import Tensor

from .. import families
from ..helpers import edit_json

Weights = dict[str, Tensor]
BIAS, TAPS = "model.layers.2.feed_forward.expert_bias", "model.layers.0.conv.conv.weight"
EXPERT = "model.layers.3.feed_forward.experts.5.w2.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return families.make("lfm2_moe", tmp_path / "source")


CHANGES: dict[str, tuple[Callable[[Weights], object], str]] = {
    "no bias": (lambda weights: weights.pop(BIAS), f"{BIAS} is missing; (6,) is needed"),
    "another bias": (lambda weights: weights.update({BIAS: torch.zeros(5)}), f"{BIAS} is of shape (5,)"),
    "more taps": (lambda weights: weights.update({TAPS: torch.zeros(40, 1, 4)}), f"{TAPS} is of shape (40, 1, 4)"),
    "no norm": (lambda weights: weights.pop("model.embedding_norm.weight"), "model.norm.weight is missing"),
    "no expert": (lambda weights: weights.pop(EXPERT), f"No shard holds {EXPERT}."),
}


@pytest.mark.parametrize(("how", "cause"), CHANGES.values(), ids=CHANGES)
def test_weights_that_do_not_fit(source: Path, how: Callable[[Weights], object], cause: str) -> None:
    error = families.refused(source, how)
    assert cause in error.cause and error.hint


@pytest.mark.parametrize(
    "fields", [{"layer_types": None}, {"layer_types": 7}, {"num_dense_layers": 4}, {"conv_L_cache": 0}], ids=str
)
def test_configurations_that_make_no_sense(source: Path, fields: dict[str, Any]) -> None:
    edit_json(source / "config.json", lambda given: given.update(fields))
    with pytest.raises(CheckpointError, match="does not describe a model"):
        described(str(source))
    with pytest.raises(CheckpointError):
        DensePart(Checkpoint(source), 4)


def test_a_bias_of_32_bits_stays_as_it_is(source: Path) -> None:
    assert DensePart(Checkpoint(source), 4).plan[BIAS] == (torch.float32, (6,))
