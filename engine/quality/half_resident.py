"""What substitution costs, on any machine: routers choose as if half of each layer's experts were in GPU memory.

Which half changes from token to token: the experts that were used last. A chat on a card substitutes by what is really
there, which depends on its memory; this is the same for everybody, and the frontier (`candidates`) counts likewise.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...models.errors import UsageError
from ..decoder.decoders import LibraryDecoder
from ..experts import substitution
from ..loader import LoadedModel
from ..quality_presets import Preset

RESIDENT_SHARE = 0.5  # of a layer's experts


@contextmanager
def half_resident(loaded: LoadedModel, preset: Preset) -> Generator[tuple[LoadedModel, Preset]]:
    """The model whose routers do so while this is open, and the preset for its layers, which then substitute nothing.

    Both are as they were if the preset substitutes nothing.

    Raises:
        UsageError: the routers of this family choose by other scores than the chances of a softmax.
    """
    if not preset.rule.alpha:
        yield loaded, preset
        return
    family = loaded.packed.manifest.family
    if family.routing.kind != "softmax":
        raise UsageError(
            f"Experts of {family.called} cannot be substituted",
            "That is only done where a router chooses by the chances of a softmax.",
            "Leave out --alpha, or the preset that replaces experts.",
        )
    handles = [
        _substituting(router, loaded.packed.manifest.architecture.experts, preset.rule.alpha, family.normalizes(router))
        for router in map(family.router, family.blocks(loaded.model))
    ]
    try:
        # The fused pass has routers of its own.
        yield (
            replace(loaded, decoder=LibraryDecoder(loaded.model)),
            replace(preset, rule=replace(preset.rule, alpha=0.0)),
        )
    finally:
        for handle in handles:
            handle.remove()


def _substituting(router: nn.Module, experts: int, alpha: float, normalized: bool) -> Any:
    """Make a router answer with substitutes; returns what ends that."""
    resident = substitution.Residency(max(1, round(RESIDENT_SHARE * experts)))

    def answer(_module: nn.Module, _given: object, found: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits, weights, index = found
        chances = logits.float().softmax(-1)
        index, weights = substitution.substitute_all(chances, index, weights, resident, alpha, normalized=normalized)
        return logits, weights, index

    return router.register_forward_hook(answer)
