"""A pack that RAM does not hold: the same answers, rows from the disk, and no more memory than there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.planning import disk_tier
from floe_chat.engine.planning.memory_plan import Needs
from floe_chat.engine.sampling import Sampler
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.pack import PackSpec

from ..helpers import make_checkpoint, make_pack
from .driver import GREEDY, answer, open_model, silent
from .margins import clear_prompt, prompt_of
from .offloading import SKIPPING, needs_of

SHARES = (0.0, pytest.param(0.5, marks=pytest.mark.thorough))
"""Of the memory between the least that works and all of the pack."""
PROMPTS = [prompt_of(seed, 9)[1:] for seed in range(3, 63)]
"""Short, since so many neurons come close to thresholds; with no token in common, which may bring one to its own."""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that take much beside keys and values."""
    folder = tmp_path_factory.mktemp("tier")
    source = make_checkpoint(folder / "source", hidden=64, intermediate=480, experts=8, layers=3)
    make_pack(source, folder / "pack", PackSpec(up=3, gate=4, down=4))
    return folder / "pack"


@pytest.fixture(scope="module")
def needs(pack: Path) -> Needs:
    """In RAM, where the dense part and keys and values have 32 bits."""
    return replace(needs_of(pack, 4), dense=disk_tier.dense_bytes(PackedModel.open(pack)))


def opened(pack: Path, room: int, patch: pytest.MonkeyPatch, reserve: int = 0) -> tuple[LoadedModel, str]:
    """The pack with so much room in RAM, and so much that stays free; and how it was opened."""
    patch.setattr(disk_tier, "room", lambda: room)
    patch.setattr(disk_tier, "reserve", lambda: reserve)
    loaded, told = load(pack, None, "cpu", silent)
    return loaded, told.reason


@pytest.fixture(scope="module")
def asked(pack: Path) -> tuple[list[int], list[int]]:
    """A prompt without a close decision, and its answer from RAM; by sums that do not hang on what comes together."""
    whole = open_model(pack)
    whole.control.preset = SKIPPING
    return clear_prompt(whole, lambda ids: answer(whole, ids, max_new_tokens=6).tokens, PROMPTS)


@pytest.mark.parametrize("share", SHARES)
def test_answers_are_those_of_a_pack_in_ram(
    pack: Path, needs: Needs, asked: tuple[list[int], list[int]], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, want = asked
    room = needs.least() + int(share * (needs.whole() - needs.least()))
    # Even where the system's cache would do.
    monkeypatch.setattr(disk_tier, "disk_reads", Mock(return_value=(0.0, 1.0)))
    loaded, reason = opened(pack, room, monkeypatch)
    assert "read from the disk" in reason and loaded.offload is not None and loaded.device == "cpu"
    assert not loaded.offload.parts.cpu and loaded.offload.memory.nbytes < room
    loaded.control.preset = SKIPPING
    for _ in range(2):
        assert answer(loaded, prompt, max_new_tokens=6).tokens == want
    assert loaded.offload.moved()[0] > 0
    for guesses in (want, [*want[:2], *((token + 1) % 250 for token in want[2:])]):
        assert guessed(loaded, prompt, guesses) == want
    loaded.close()


@torch.inference_mode()
def guessed(loaded: LoadedModel, prompt: Sequence[int], guesses: Sequence[int]) -> list[int]:
    """As many tokens behind a prompt as there are guesses, three of which are computed with each."""
    decoder, preset, kv, found = loaded.decoder, loaded.control.preset, KVCache(), list[int]()
    found.append(int(decoder.forward(prompt, kv).argmax()))
    kv.computed(prompt, preset)
    while len(found) < len(guesses):
        further = guesses[len(found) : len(found) + 3]
        drawn = decoder.several(found[-1], kv, Sampler(GREEDY, prompt), 1 + len(further), (), further)
        assert drawn is not None and drawn[2] == len(further)
        kv.computed([found[-1], *drawn[0][:-1]], preset)
        found += drawn[0]
    return found[: len(guesses)]


def test_how_a_pack_is_opened(pack: Path, needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the edge the system's cache would hold the pack, or nearly: the tier's smaller share would read more."""
    whole, reserve = needs.whole(), (needs.whole() - needs.least()) // 2
    for room, free, tier, words in (
        (whole, 0, False, ""),
        (whole - reserve, reserve, False, ""),
        (whole - reserve - reserve // 8, reserve, False, "the system reads the rest"),
        (whole - reserve // 4, 0, True, "the rows used most stay there"),
        (needs.least() - 1, 0, False, "less than the"),
    ):
        loaded, reason = opened(pack, room, monkeypatch, free)
        assert (loaded.offload is not None) == tier and words in reason and ("RAM" in reason) == bool(words)
        loaded.close()


@pytest.mark.usefixtures("no_library")
def test_without_the_compiled_link_the_system_reads_the_pack(
    pack: Path, needs: Needs, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, reason = opened(pack, needs.least(), monkeypatch)
    assert loaded.offload is None and "because it was not compiled" in reason
    loaded.close()
