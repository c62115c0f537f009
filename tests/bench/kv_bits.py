"""What keys and values of 8 bits lose against 16: `python tests/bench/kv_bits.py [--tokens 4096]`.

The demo, which leaves nothing out, reads a text as `floe-chat eval --kv-bits 8` does; the second half of each window
counts. Then one token attends with Mixtral's heads to random keys and values, some of whose channels are much larger
than the others, as trained ones have them.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, replace

import torch
from floe_chat.app import progress
from floe_chat.engine.loader import load
from floe_chat.engine.quality.divergence import Divergence
from floe_chat.engine.quality.evaluate import kv_divergence
from floe_chat.engine.quality.references import NO_SPARSITY
from floe_chat.engine.quality.told import Told
from floe_chat.kernels.entries import CODES, stored
from floe_chat.kernels.mixers.grouped import Heads, attend
from floe_chat.models.catalog import asset
from floe_chat.models.tokenizer.chat_format import ChatFormat

WINDOW = 512  # tokens, half of which are predicted
HEADS, KEY_HEADS, DIM = 32, 8, 128
BEHIND = (1024, 16384)
OUTLIERS, FACTORS = 4, (1.0, 8.0)  # channels of each key, and how many times as large they are


def of_the_demo(tokens: int) -> Divergence:
    """8 bits against 16, on the manual that it was trained on."""
    text = asset("demo", "manual.md").read_text(encoding="utf-8")
    ids = ChatFormat(asset("demo", "packed")).encode([{"role": "user", "content": text}])
    count = min(tokens, len(ids)) // WINDOW
    windows = torch.tensor(ids[: count * WINDOW]).view(count, WINDOW)
    loaded, _ = load(asset("demo", "packed"), None, "cpu", lambda _step, _share: None, library=True)
    return kv_divergence(loaded, NO_SPARSITY, windows, WINDOW // 2, Told(progress.step, progress.note))


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
