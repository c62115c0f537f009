"""An assistant's logits are those that transformers' own model computes by the keys and values of whole texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from floe_chat.engine.decoder.draft_assistant import DraftAssistant
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_stores import GrowingStore
from floe_chat.engine.decoder.quantized_linear import through
from floe_chat.engine.loader import LoadedModel
from floe_chat.models.checking.repair import add_draft
from floe_chat.models.packing.assistant_part import AssistantSource
from floe_chat.models.packing.pack import EXACT
from torch import Tensor

from .. import families
from ..helpers import make_pack, reference_model, relative_rms
from .driver import open_model

IDS = torch.randint(3, 259, (320,), generator=torch.Generator().manual_seed(4)).tolist()


def silent(_step: str, _share: float, _left: float | None) -> None:
    """Progress that nobody looks at."""


def opened(name: str, folder: Path) -> tuple[LoadedModel, families.Assistant]:
    source = families.make(name, folder / "source")
    theirs = families.add_assistant(source, folder / "assistant")
    family = make_pack(source, folder / "pack", EXACT).family
    add_draft(AssistantSource(folder / "assistant", family), folder / "pack", silent)
    return open_model(folder / "pack", "Exact"), theirs


def logits_of(loaded: LoadedModel, kv: KVCache, text: Sequence[int], given: Sequence[int]) -> list[Tensor]:
    """Of all tokens: what it makes of a text's last token, and of further ones, each behind the one before."""
    head = loaded.decoder.head
    assert isinstance(head, DraftAssistant)
    for start in range(kv.length, len(text) - 1, 16):
        some = list(text[start : len(text) - 1][:16])
        loaded.decoder.forward(some, kv)
        kv.computed(some, loaded.control.preset)
    place, found = head._place(kv), list[Tensor]()  # pyright: ignore[reportPrivateUsage]
    assert place is not None
    hidden = head._model.norm(head._stream, head._model.eps)  # pyright: ignore[reportPrivateUsage]
    for token in (text[-1], *given):
        normed = head._normed(token, hidden, place)  # pyright: ignore[reportPrivateUsage]
        found.append(through(head._heads[-1], normed)[0])  # pyright: ignore[reportPrivateUsage]
        hidden = through(head._back, normed)  # pyright: ignore[reportPrivateUsage]
    return found


@torch.inference_mode()
@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["gemma4", "gemma4_text"])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts within the window and beyond, and of one so long that the first entries have left their memory."""
    monkeypatch.setattr("floe_chat.engine.decoder.fused_pass.SLACK", 16)
    loaded, theirs = opened(name, tmp_path)
    whole, kv = reference_model(tmp_path / "source"), KVCache()
    for length in (2, 8, 9, 10, 30, 320):
        text = IDS[:length]
        wanted = theirs.steps(whole, text, 3)
        got = logits_of(loaded, kv, text, [int(logits.argmax()) for logits in wanted[:-1]])
        errors = [relative_rms(mine, own) for mine, own in zip(got, wanted, strict=True)]
        assert errors[0] <= 1e-5 and max(errors) <= 1e-4  # each is computed of what the one before left, noise too
    store = loaded.decoder.store(kv)
    assert isinstance(store, GrowingStore) and store.firsts()[0] > 0
