"""What the dense part of a decode step costs beside its computing: a tiny model, experts replaced by nothing.

    python tests/bench/dense_overhead.py [--tokens 200] [--families mixtral olmoe]
    python tests/bench/dense_overhead.py --families minimax_m2 afmoe dots1 hunyuan_v1_moe

The lean pass (with the compiled step and by torch's operations) and transformers' own modules, in one run, in turns and
on one thread; these alone of families that the lean pass does not compute.
Milliseconds of processor time per layer and token, which other programs hardly change: a model of many layers less the
same model's first ones, so that embedding and head do not count. The floor is what a layer's 30,000 weights take to be
multiplied, a few microseconds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from floe_chat.engine.decoder.decoders import Decoder, FusedDecoder, LibraryDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.layers import Unsupported
from floe_chat.engine.decoder.ways import Way
from floe_chat.engine.quality_presets import Preset
from floe_chat.models.families import FAMILIES, family_of
from torch import Tensor, nn

LAYERS, FIRST = 24, 8
GOAL_MS = 0.08
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
}
OWN: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "afmoe": {"num_dense_layers": 0, "head_dim": 16},
    "minimax_m2": {"head_dim": 16, "rotary_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 16},
}
PRESET = Preset("", x_bits=22)


class Nothing(nn.Module):
    """Stands where experts stood."""

    def forward(self, hidden: Tensor, _index: Tensor, _weights: Tensor) -> Tensor:
        return hidden


def make_model(family: str, layers: int = LAYERS) -> Any:
    """A random tiny model without experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.for_model(family, **SIZES | {"num_hidden_layers": layers} | OWN.get(family, {}))
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    for block in family_of(family).blocks(model):
        block.experts = Nothing()
    return model.eval()


def without_native(model: Any) -> FusedDecoder:
    """The lean pass by torch's operations."""
    lean = FusedDecoder(model, 2048)
    lean.way = Way(lean)
    return lean


def token_ms(decoder: Decoder, tokens: int) -> float:
    """The median of one token after a prompt of 64."""
    kv, ids = KVCache(), torch.randint(0, 101, (64 + tokens,)).tolist()

    def feed(part: Sequence[int]) -> float:
        began = time.thread_time()
        decoder.forward(part, kv)
        kv.computed(part, PRESET)
        return 1e3 * (time.thread_time() - began)

    feed(ids[:64])
    return median(feed([one]) for one in ids[64:])


def layer_ms(model: Any, decoder: Decoder, tokens: int) -> float:
    """Milliseconds per layer and token."""
    whole = token_ms(decoder, tokens)
    model.config.num_hidden_layers = FIRST
    first = token_ms(decoder, tokens)
    model.config.num_hidden_layers = LAYERS
    return (whole - first) / (LAYERS - FIRST)


def library_ms(family: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Milliseconds per layer and token where the library's modules run."""
    sizes = LAYERS, FIRST
    models = [LibraryDecoder(make_model(family, layers)) for layers in sizes]
    whole, first = (min(token_ms(decoder, tokens) for _ in range(rounds)) for decoder in models)
    return {"family": family, "library_ms": round((whole - first) / (LAYERS - FIRST), 4)}


def measure(family: str, tokens: int, rounds: int) -> dict[str, Any]:
    """The least of a few rounds: whatever else runs makes times longer."""
    model = make_model(family)
    lean = FusedDecoder(model, 2048)
    decoders: dict[str, Decoder] = {"lean": lean, "torch": without_native(model)}
    times = {name: min(layer_ms(model, decoder, tokens) for _ in range(rounds)) for name, decoder in decoders.items()}
    times["library"] = library_ms(family, tokens, rounds)["library_ms"]
    return {
        "family": family,
        "reason": lean.reason,
        **{f"{name}_ms": round(value, 4) for name, value in times.items()},
        "of_library": round(times["lean"] / times["library"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"ms per layer and token; goal {GOAL_MS}")
    given = arguments.tokens, arguments.rounds
    rows: list[dict[str, Any]] = []
    for family in arguments.families:
        try:
            rows.append(measure(family, *given))
        except Unsupported:
            rows.append(library_ms(family, *given))
    for row in rows:
        if "lean_ms" not in row:
            print(f"{row['family']:10} transformers {row['library_ms']:.3f}")
            continue
        print(
            f"{row['family']:10} lean {row['lean_ms']:.3f}  torch {row['torch_ms']:.3f}  "
            f"transformers {row['library_ms']:.3f}  ({row['reason']})"
        )
    print(json.dumps({"layers": LAYERS, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
