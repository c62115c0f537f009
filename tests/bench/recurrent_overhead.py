"""What a token takes in a layer of gated delta rules besides its projections: Qwen3.5-35B-A3B's sizes, transformers'
modules, as packs of that family run it.

    .venv/bin/python tests/bench/recurrent_overhead.py [--tokens 200]

Projections are replaced by what returns the same numbers each time, so that what is left is the convolution, the state
and the calls themselves. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch
from floe_chat.models.families import FAMILIES
from floe_chat.models.transformers_import import import_model_code
from torch import Tensor, nn

PROMPT, WARM = 8, 20  # tokens before those that are timed


class Fixed(nn.Module):
    """A projection that costs nothing."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._y = torch.randn(1, 1, outputs) * 0.02

    def forward(self, x: Tensor) -> Tensor:
        """(1, T, K) -> (1, T, N)."""
        return self._y.expand(1, x.shape[1], -1)


def token_ms(tokens: int) -> float:
    """Of one layer."""
    import_model_code()
    from transformers import AutoConfig
    from transformers.cache_utils import DynamicCache
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as library

    config: Any = AutoConfig.for_model("qwen3_5_moe_text", **FAMILIES["qwen3_5_moe_text"].defaults)
    layer: Any = library.Qwen3_5MoeGatedDeltaNet(config, 0).eval()
    for name, module in list(layer.named_children()):
        if isinstance(module, nn.Linear):
            setattr(layer, name, Fixed(module.out_features))
    cache, took = DynamicCache(config=config), list[float]()
    with torch.inference_mode():
        layer(torch.randn(1, PROMPT, config.hidden_size), cache_params=cache)
        for _ in range(WARM + tokens):
            x = torch.randn(1, 1, config.hidden_size)
            begun = time.perf_counter()
            layer(x, cache_params=cache)
            took.append(time.perf_counter() - begun)
    return 1e3 * median(took[WARM:])


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200)
    found = [token_ms(parser.parse_args().tokens) for _ in range(5)]
    print(f"one layer, one token, {torch.get_num_threads()} threads: {min(found):.2f} to {max(found):.2f} ms")
    print(json.dumps({"threads": torch.get_num_threads(), "ms": round(median(found), 3)}))


if __name__ == "__main__":
    main()
