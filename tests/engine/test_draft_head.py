"""The head that models are published with to guess further tokens: packed, read, and computed by our own pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from floe_chat.engine.decoder.fused_pass import FusedDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_stores import GrowingStore
from floe_chat.engine.decoder.layers import read_rope
from floe_chat.engine.experts.moe_layer import MoELayer
from floe_chat.engine.loader import _Linear  # pyright: ignore[reportPrivateUsage]
from floe_chat.engine.telemetry import Telemetry
from floe_chat.models.modules import library_model, light_modules
from floe_chat.models.pack.draft_head import PackedHead
from floe_chat.models.pack.manifest import DRAFT
from floe_chat.models.pack.packed_model import PackedLayer, PackedModel
from floe_chat.models.packing.pack import EXACT
from torch import Tensor

from .. import families
from ..helpers import make_pack, reference_model, relative_rms
from .driver import open_model


def logits_of(pack: Path, ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
    """What our own pass computes of a head, of each token but the first: (T - 1, V)."""
    loaded, packed = open_model(pack), PackedModel.open(pack)
    head, manifest = packed.head(), packed.manifest
    assert isinstance(head, PackedHead), packed.headless
    theirs = {name: tensor for name, tensor in packed.dense().items() if manifest.family.is_embedding(name)}
    theirs |= {name: tensor for name, tensor in packed.dense().items() if name.startswith("lm_head")}
    experts = head.experts
    model = library_model.build(
        head.config,
        manifest.family,
        head.dense | theirs,
        manifest.widths.dense,
        lambda index: MoELayer(index, some(experts), loaded.control, Telemetry(1, manifest.architecture.experts)),
        _Linear("cpu", loaded.control),
        torch.float32,
        "cpu",
        None if not light_modules.knows(head.config) else light_modules.tree,
    )
    decoder = FusedDecoder(model, 64)
    eps = getattr(head.config, manifest.family.eps)
    both = decoder.embedded(ids[1:]), hidden[:-1]
    normed = [rms_norm(x, weight, eps) for x, weight in zip(both, (head.embedding_norm, head.hidden_norm), strict=True)]
    joined = head.joined.float() if isinstance(head.joined, Tensor) else head.joined.dense(torch.float32)
    x = torch.cat(normed, -1) @ joined.T
    kv = KVCache()
    store = decoder.store(kv)
    assert isinstance(store, GrowingStore)
    store.reserve(len(x))
    rope = read_rope(model, manifest.family).tables(0, len(x))
    with torch.inference_mode():
        x, added = decoder.walk(decoder._by_torch(store, rope, 0), x)  # pyright: ignore[reportPrivateUsage]
        return decoder.logits(x if added is None else x + added)


def some(layer: PackedLayer | None) -> PackedLayer:
    assert layer is not None
    return layer


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.some(3)
@pytest.mark.parametrize("name", families.HEADS)
def test_a_head_guesses_as_its_definition_says(name: str, tmp_path: Path) -> None:
    """By transformers' own layer, norms and linear layers of the published weights, at 16 bits."""
    source = families.make(name, tmp_path / "source")
    head = families.add_head(source)
    manifest = make_pack(source, tmp_path / "pack", EXACT)
    assert [*manifest.beside] == [DRAFT]
    theirs = reference_model(source)
    ids = torch.randint(3, theirs.config.vocab_size, (9,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        hidden = theirs.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        wanted = head.logits(theirs, ids, hidden)
    assert relative_rms(logits_of(tmp_path / "pack", ids.tolist(), hidden), wanted) <= 1e-5
