"""Groups of processes, started once for all tests of a worker, and small models of three families in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder import fused_pass, layers
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.experts.moe_layer import MoELayer
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.models.catalog import asset
from floe_chat.models.packing.pack import EXACT
from torch import Tensor

from ... import families
from ...helpers import make_pack
from ..driver import silent
from .leader import as_computed, preset_of, run
from .processes import Processes

PROMPT, NEW = 41, 3


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


# By what is special: experts with biases; shared experts, groups of experts and layers without any.
FAMILIES = {
    "gpt_oss": {**families.MODELS["gpt_oss"], "num_local_experts": 6, "intermediate_size": 32},
    "deepseek_v2": {**families.MODELS["deepseek_v2"], "moe_intermediate_size": 24},
}


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Four processes."""
    modules = ["transformers.models.gpt_oss.modeling_gpt_oss"]
    started = Processes(4, tmp_path_factory.mktemp("four"), forked=True, modules=modules)
    yield started
    started.kill()


@pytest.fixture(scope="session")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model, and 16-bit packs of FAMILIES."""
    folder = tmp_path_factory.mktemp("families")
    found = {"demo": asset("demo", "packed")}
    with pytest.MonkeyPatch.context() as patch:
        for name, sizes in FAMILIES.items():
            patch.setitem(families.MODELS, name, sizes)
            make_pack(families.make(name, folder / name), folder / f"{name}-packed", EXACT)
            found[name] = folder / f"{name}-packed"
    return found


@pytest.fixture(scope="session")
def alone(packs: dict[str, Path]) -> dict[str, Alone]:
    return {name: Alone(pack) for name, pack in packs.items()}
