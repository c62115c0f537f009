"""A pack in the place of its 16-bit source: settings are then compared with the pack's own weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...models.checkpoint import Checkpoint
from ..loader import LoadedModel
from .references import NO_SPARSITY, use
from .source_model import SourceModel


class Model(Protocol):
    """What settings are computed in; see `SourceModel`."""

    def states(self, ids: Tensor) -> Tensor: ...

    def head(self, states: Tensor) -> Tensor: ...


class PackSource:
    """What `candidates` need of a checkpoint, read from a loaded pack: experts as its codes represent them.

    Args:
        loaded: with transformers' own modules, on the CPU.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.config, architecture = loaded, loaded.model.config, loaded.packed.manifest.architecture
        self.family = loaded.packed.manifest.family
        self.experts, self.neurons = architecture.experts, architecture.intermediate
        self.layers = range(architecture.layers)
        self._layer = lru_cache(1)(loaded.packed.layer)

    def expert(self, layer: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate and up (F, H) and down (H, F), float32."""
        own = self._layer(layer)
        signal = own.signal.dense(number, torch.float32)
        other, down = own.rows.layout.read(own.rows.data[number], torch.float32)
        gate, up = (signal, other) if self.loaded.packed.manifest.signal_of(layer) == "gate" else (other, signal)
        return gate, up, down.T


class _PackModel:
    """The pack's attention, norms and routers with other experts."""

    def __init__(self, source: PackSource, experts: Callable[[int, nn.Module], nn.Module]) -> None:
        use(source.loaded, NO_SPARSITY)
        self._model: Any = source.loaded.model
        self._divided = source.family.factor(source.config, source.family.divided)
        self._blocks = source.family.blocks(self._model)
        self._experts = [experts(at, source.family.router(block)) for at, block in enumerate(self._blocks)]

    def states(self, ids: Tensor) -> Tensor:
        """See `SourceModel`."""
        own = [block.experts for block in self._blocks]
        try:
            for block, experts in zip(self._blocks, self._experts, strict=True):
                block.experts = experts
            with torch.inference_mode():
                return self._model.model(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            for block, experts in zip(self._blocks, own, strict=True):
                block.experts = experts

    def head(self, states: Tensor) -> Tensor:
        """See `SourceModel`."""
        with torch.inference_mode():
            return self._model.lm_head(states) / self._divided


def model_of(
    source: Checkpoint | PackSource, report: Callable[[str], None], experts: Callable[[int, nn.Module], nn.Module]
) -> Model:
    """The source's model with other experts: layer and its router -> the module that computes them."""
    return _PackModel(source, experts) if isinstance(source, PackSource) else SourceModel(source, report, experts)
