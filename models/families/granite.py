"""Granite 3 MoE (IBM): small experts stored together, and multipliers of embedding, attention and residual stream."""

from __future__ import annotations

from ..catalog_entry import CatalogEntry, Sizes
from .family import Family, Routing
from .storage import Stacked


def _sizes(layers: int, hidden: int, experts: int, heads: int) -> Sizes:
    return Sizes(
        model_type="granitemoe",
        layers=layers,
        hidden=hidden,
        intermediate=512,
        experts=experts,
        top_k=8,
        heads=heads,
        kv_heads=8,
        head_dim=64,
        vocab=49155,
        window=131072,
        tied=True,
    )


GRANITEMOE = Family(
    model_type="granitemoe",
    called="Granite MoE",
    stored=(Stacked("model.layers.{layer}.block_sparse_moe.{part}.weight", "input_linear", "output_linear"),),
    renames=((".block_sparse_moe.router.layer.", ".block_sparse_moe.router."),),
    block="block_sparse_moe",
    routing=Routing(module="router", normalized=True),
    scaled="embedding_multiplier",
    added="residual_multiplier",
    divided="logits_scaling",
    published=tuple(
        CatalogEntry(
            name,
            sizes,
            f"ibm-granite/{name}",
            licence="Apache-2.0",
            gated=False,
            chat="<|start_of_role|> turns, from its own chat template",
            released="2024-12",
        )
        for name, sizes in (
            ("granite-3.1-1b-a400m-instruct", _sizes(24, 1024, 32, 16)),
            ("granite-3.1-3b-a800m-instruct", _sizes(32, 1536, 40, 24)),
        )
    ),
)
