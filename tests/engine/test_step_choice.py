"""Which pass computes a model's dense part, for which reason, and which tokens it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder.decoders import FusedDecoder, LibraryDecoder, choose
from floe_chat.engine.decoder.kv_cache import KVCache
from torch import nn

from ..helpers import relative_rms
from .driver import open_model
from .step_models import LIMIT, WINDOW, feed, ids_of, make_model


def test_joined_weights_are_there_once(tiny_pack: Path) -> None:
    model = open_model(tiny_pack).model
    lean = choose(model, 512)
    attention = model.model.layers[1].self_attn
    parts = [getattr(attention, name).weights.q for name in ("q_proj", "k_proj", "v_proj")]
    assert isinstance(lean, FusedDecoder)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert parts[0].untyped_storage().nbytes() == sum(part.nbytes for part in parts)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (
            "mixtral",
            {"head_dim": 12, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic changes with the length",
        ),
        (
            "mixtral",
            {
                "head_dim": 12,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "short_factor": [1.0] * 6,
                    "long_factor": [2.0] * 6,
                    "original_max_position_embeddings": 64,
                },
            },
            "longrope changes with the length",
        ),
        ("phimoe", {}, "its router is SparseMixer's"),
    ],
)
def test_what_it_does_not_compute_the_library_does_and_the_reason_is_told(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    model = make_model(name, **changes)
    decoder = choose(model, WINDOW)
    assert isinstance(decoder, LibraryDecoder) and reason in decoder.reason
    ids = ids_of(20)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    assert relative_rms(feed(decoder, KVCache(), ids, [19, 1])[-1], expected) <= LIMIT


@pytest.mark.parametrize(
    ("dtype", "library", "reason"),
    [
        (torch.float32, True, "one compiled call per layer and token"),
        (torch.bfloat16, True, "by torch's operations, because the compiled step computes float32, not torch.bfloat16"),
        (torch.float32, False, "by torch's operations, because it was not compiled"),
    ],
)
def test_it_is_told_whether_the_compiled_step_runs(
    dtype: torch.dtype, library: bool, reason: str, request: pytest.FixtureRequest
) -> None:
    if not library:
        request.getfixturevalue("no_library")
    lean = choose(make_model("mixtral", dtype), WINDOW)
    assert isinstance(lean, FusedDecoder) and lean.reason.endswith(reason)
    assert bool(lean.steps) == ("compiled call per" in reason)


def without_bias(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.bias = None


def turns_a_part(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:4]


class Wrapped(nn.Linear):
    """A linear layer that may compute something else."""


def wraps(model: Any) -> None:
    old = model.model.layers[2].self_attn.v_proj
    model.model.layers[2].self_attn.v_proj = Wrapped(old.in_features, old.out_features)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(without_bias, "have a bias"), (turns_a_part, "turns a part of each head"), (wraps, "stored in different ways")],
)
def test_parts_it_does_not_know_are_declined(change: Any, reason: str) -> None:
    model = make_model("olmoe-biased-clipped")
    change(model)
    decoder = choose(model, WINDOW)
    assert isinstance(decoder, LibraryDecoder) and reason in decoder.reason


def test_a_loaded_model_tells_what_computes_its_dense_part(tiny_pack: Path) -> None:
    assert isinstance(open_model(tiny_pack).decoder, FusedDecoder)


def test_more_tokens_than_the_window_are_refused() -> None:
    lean = choose(make_model("mixtral"), 10)
    with pytest.raises(ValueError, match="window"):
        lean.forward(ids_of(11), KVCache())


@pytest.mark.parametrize("token", [-1, 101])
def test_tokens_outside_the_vocabulary_are_refused_and_the_next_ones_are_not(token: int) -> None:
    lean, kv = choose(make_model("mixtral"), WINDOW), KVCache()
    with pytest.raises(IndexError, match="vocabulary"):
        lean.forward([5, token], kv)
    assert kv.length == 0 and bool(lean.forward([5, 100], kv).isfinite().all())
