"""What keys and values of 8 bits lose against 16: `python tests/bench/kv_bits.py [--tokens 4096]`.

The demo at its best preset reads texts token by token, with both forms; the second half of each window counts. Then
one token attends with Mixtral's heads to random keys and values, some of whose channels are much larger than the
others, as trained ones have them.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, replace

import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.events import Advanced
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.quality.divergence import Divergence, Scores, score, summarize
from floe_chat.engine.quality.evaluate import NO_SPARSITY
from floe_chat.kernels.entries import CODES, stored
from floe_chat.kernels.step import Heads, attend
from floe_chat.models.catalog import asset
from floe_chat.models.tokenizer.chat_format import ChatFormat
from torch import Tensor

WINDOW = 512  # tokens, half of which are predicted
HEADS, KEY_HEADS, DIM = 32, 8, 128
BEHIND = (1024, 16384)
OUTLIERS, FACTORS = 4, (1.0, 8.0)  # channels of each key, and how many times as large they are


def opened(bits: str) -> LoadedModel:
    """The demo, which leaves nothing out."""
    given = Advanced(kv_bits=bits)
    loaded, told = load(asset("demo", "packed"), None, "cpu", lambda _step, _share: None, advanced=given)
    assert ("8 bits" in told.reason) == (bits == "8"), told.reason
    loaded.control.preset = NO_SPARSITY
    return loaded


def logits(loaded: LoadedModel, ids: list[int]) -> Tensor:
    """(N, V) of the second half of a window, token by token."""
    kv, found = KVCache(), list[Tensor]()
    first = len(ids) // 2
    for part in [ids[:first], *([one] for one in ids[first:-1])]:
        found.append(loaded.decoder.forward(part, kv))
        kv.computed(part, loaded.control.preset)
    return torch.cat(found)


def of_the_demo(tokens: int) -> Divergence:
    """8 bits against 16, on the manual that it was trained on."""
    text = asset("demo", "manual.md").read_text(encoding="utf-8")
    ids = ChatFormat(asset("demo", "packed")).encode([{"role": "user", "content": text}])
    exact, coarse = opened("16"), opened("8")
    scores: list[Scores] = []
    for start in range(0, min(tokens, len(ids)) // WINDOW * WINDOW, WINDOW):
        window = ids[start : start + WINDOW]
        scores.append(score(logits(coarse, window), logits(exact, window), torch.tensor(window[WINDOW // 2 :])))
    return summarize(scores)


def at_mixtrals_shape(behind: int, dtype: torch.dtype, factor: float) -> float:
    """The relative RMS error of one token's attention behind so many, with some channels so many times as large."""
    heads = Heads(HEADS, KEY_HEADS, DIM, DIM**-0.5)
    entries = torch.randn(behind + 1, *heads.entry)
    entries[:, :KEY_HEADS, :OUTLIERS] *= factor
    qkv, rope = torch.randn(1, (HEADS + 2 * KEY_HEADS) * DIM), torch.stack([torch.ones(DIM), torch.zeros(DIM)])
    found = attend(qkv, rope, stored(entries, dtype), behind, replace(heads, cache_dtype=dtype), 1e-5)
    wanted = attend(qkv, rope, entries, behind, heads, 1e-5)
    return float((found - wanted).norm() / wanted.norm())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tokens", type=int, default=4096)
    torch.manual_seed(0)
    demo = of_the_demo(options.parse_args().tokens)
    print(f"demo, {demo.tokens} tokens predicted: mean KL {demo.kl_mean:.2g}, 99 % {demo.kl_99:.2g} nats, ", end="")
    print(f"perplexity {demo.source_perplexity:.4f} with 16 bits and {demo.perplexity:.4f} with 8, ", end="")
    print(f"same token {demo.same_top:.2%}")
    attention: list[dict[str, float | str]] = []
    for behind, factor, dtype in itertools.product(BEHIND, FACTORS, (torch.float16, CODES)):
        error = at_mixtrals_shape(behind, dtype, factor)
        attention.append({"behind": behind, "factor": factor, "dtype": str(dtype), "error": error})
        print(f"Mixtral's heads, {behind:6,} tokens, channels up to {factor:.0f} times: {dtype} error {error:.2g}")
    print(json.dumps({"demo": asdict(demo), "attention": attention}))


if __name__ == "__main__":
    main()
