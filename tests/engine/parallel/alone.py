"""The same models in one process, for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder import fused_pass, layers
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.experts.moe_layer import MoELayer
from floe_chat.engine.loader import LoadedModel, load
from torch import Tensor

from ..driver import silent
from .leader import as_computed, preset_of, run

PROMPT, NEW = 41, 6


def prompt_of(length: int = PROMPT) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def one_at_a_time(*_given: object) -> None:
    """As a decoder that does not draw."""


class Alone:
    """The same model in one process."""

    def __init__(self, pack: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for module in (layers, fused_pass):
                patch.setattr(module, "kept_dtype", as_computed)
            self.loaded: LoadedModel = load(pack, None, "cpu", silent)[0]

    def answer(self, prompt: Sequence[int], rule: dict[str, Any] | None = None) -> tuple[list[int], list[Tensor]]:
        """A greedy answer, and the logits (V,) that each token was drawn from."""
        loaded = self.loaded
        loaded.control.preset = preset_of(rule or {})
        loaded.telemetry.begin(1, len(prompt), 0.0)
        seen: list[Tensor] = []
        decoder, forward = loaded.decoder, loaded.decoder.forward

        def noted(ids: Sequence[int], kv: KVCache) -> Tensor:
            seen.append(forward(ids, kv)[0])
            return seen[-1][None]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder, "forward", noted)
            patch.setattr(decoder, "several", one_at_a_time)
            tokens, _ = run(loaded, KVCache(), list(prompt), NEW)
        return tokens, seen

    def routing(self, prompt: Sequence[int]) -> list[Tensor]:
        """Of each layer with experts, the choices (T, K) of a prompt of one chunk."""
        found: list[Tensor] = []
        layers = [each for each in self.loaded.model.modules() if isinstance(each, MoELayer)]

        def note(_layer: Any, given: tuple[Tensor, Tensor, Tensor]) -> None:
            found.append(given[1])

        hooks = [each.register_forward_pre_hook(note) for each in layers]
        self.loaded.control.preset = preset_of({})
        try:
            self.loaded.decoder.forward(list(prompt), KVCache())
        finally:
            for hook in hooks:
                hook.remove()
        return found
