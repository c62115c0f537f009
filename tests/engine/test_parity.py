"""With every weight at the source's 16 bit and nothing skipped, the engine is transformers' own model.

Logits agree to a relative RMS of 1e-5 in float32, and greedy answers token by token, through prefill in chunks, the
switch between prefill's and decode's way to compute experts, and the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.experts.moe_layer import DECODE_TOKENS, PREFILL_CHUNK
from floe_chat.engine.loader import LoadedModel
from floe_chat.models.packing.pack import EXACT
from torch import Tensor

from ..helpers import make_checkpoint, make_pack, reference_model, relative_rms
from .driver import answer, open_model
from .trained import demo_source

MODELS: dict[str, dict[str, Any] | None] = {
    "mixtral-odd-sizes": {"hidden": 40, "intermediate": 37, "experts": 5, "top_k": 3, "layers": 3, "seed": 5},
    "mixtral-float16-top-1": {"dtype": torch.float16, "experts": 3, "top_k": 1, "seed": 2},
    "demo": None,
}
LIMIT = 1e-5
NEW_TOKENS = 64


@dataclass(frozen=True)
class Pair:
    """The same model twice."""

    ours: LoadedModel
    theirs: Any

    def prompt(self, length: int) -> list[int]:
        vocabulary = self.theirs.config.vocab_size
        generator = torch.Generator().manual_seed(length)
        return torch.randint(3, vocabulary, (length,), generator=generator).tolist()

    def expected(self, ids: list[int]) -> Tensor:
        """transformers' logits at every position, from one pass without a cache: (T, V)."""
        with torch.inference_mode():
            return self.theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder: Path = tmp_path_factory.mktemp("parity")
    sizes = MODELS[request.param]
    source = demo_source(folder / "source") if sizes is None else make_checkpoint(folder / "source", **sizes)
    make_pack(source, folder / "packed", EXACT)
    theirs = reference_model(source)
    theirs.generation_config.eos_token_id = None
    return Pair(open_model(folder / "packed", "Exact"), theirs)


def our_logits(pair: Pair, prompt: list[int], new_tokens: int) -> tuple[list[int], Tensor]:
    """A greedy answer token by token, and the logits that each was drawn from."""
    seen, decoder = list[Tensor](), pair.ours.decoder

    def note(ids: Sequence[int], kv: KVCache) -> Tensor:
        seen.append(type(decoder).forward(decoder, ids, kv)[0])  # pyright: ignore[reportArgumentType]
        return seen[-1][None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "forward", note)
        patch.setattr(decoder, "several", Mock(return_value=None))
        tokens = answer(pair.ours, prompt, max_new_tokens=new_tokens).tokens
    return tokens, torch.stack(seen[-new_tokens:])


LENGTHS = [1, 2, DECODE_TOKENS, DECODE_TOKENS + 1, PREFILL_CHUNK, PREFILL_CHUNK + 1, PREFILL_CHUNK + DECODE_TOKENS + 3]


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_of_the_prompt_and_of_every_decode_step(pair: Pair, length: int) -> None:
    prompt = pair.prompt(length)
    tokens, logits = our_logits(pair, prompt, 6)
    expected = pair.expected(prompt + tokens[:-1])[length - 1 :]
    assert len(logits) == len(expected) == 6
    for step in range(6):
        assert relative_rms(logits[step], expected[step]) <= LIMIT, f"step {step}"


@pytest.mark.parametrize("length", [1, DECODE_TOKENS + 1])
def test_greedy_answers_are_token_for_token_the_same(pair: Pair, length: int) -> None:
    prompt = pair.prompt(length)
    ours = answer(pair.ours, prompt, max_new_tokens=NEW_TOKENS)
    with torch.inference_mode():
        theirs = pair.theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, length, dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
    assert ours.tokens == theirs[0, length:].tolist()
    assert len(ours.tokens) == NEW_TOKENS and ours.reason == "length"
    assert len(set(ours.tokens)) >= 5, "an answer that repeats itself compares little"
