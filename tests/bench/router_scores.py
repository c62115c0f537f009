"""What routers' scores drop in each layer, and what little used experts are like (DualSparse-MoE, figures 12 and 13).

Figure 12: the share of expert calls whose score lies below a threshold, layer by layer; scores are relative to the mean
of those that the token's router chose. Figure 13: of each expert the share of neurons whose silu(gate · x), summed over
the expert's tokens, is negative, against its load, the number of those tokens; Spearman's correlation over all experts,
and the mean of the layers'. An expert that the text never reaches has no such share, and is not counted.

Run: .venv/bin/python tests/bench/router_scores.py [CHECKPOINT] [--text FILE], of any family whose experts are
SwiGLU; by default the demo's 16-bit source, which `make demo` makes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from floe_chat.assets.demo.make import source
from floe_chat.models.catalog import asset
from floe_chat.models.families import FAMILIES
from tokenizers import Tokenizer
from torch import Tensor, nn

WINDOW = 256
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Seen:
    """What one layer's experts were given.

    Attributes:
        scores: (B, K) of each window, relative to a token's mean. loads: (E,) tokens. gates: (E, F) sums of
            silu(gate · x).
    """

    def __init__(self, experts: Any) -> None:
        self.scores: list[Tensor] = []
        self.gate = experts.gate_up_proj.chunk(2, 1)[0]  # (E, F, H)
        self.loads, self.gates = torch.zeros(len(self.gate)), torch.zeros(self.gate.shape[:2])
        experts.register_forward_pre_hook(self._note)

    def _note(self, _experts: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> None:
        hidden, index, weights = given  # (B, H), (B, K), (B, K)
        self.scores.append(weights / weights.mean(-1, keepdim=True))
        for expert in index.unique().tolist():
            tokens = (index == expert).any(-1)
            self.loads[expert] += tokens.sum()
            self.gates[expert] += F.silu(F.linear(hidden[tokens], self.gate[expert])).sum(0)

    def dropped(self) -> Tensor:
        """The share of calls below each threshold, (thresholds,)."""
        scores = torch.cat(self.scores).flatten()
        return torch.stack([(scores < threshold).float().mean() for threshold in THRESHOLDS])

    def negative(self) -> tuple[Tensor, Tensor]:
        """Of the experts in use, loads relative to the layer's mean, and the share of neurons whose sum is negative."""
        used = self.loads > 0
        return (self.loads / self.loads.mean())[used], (self.gates < 0).float().mean(-1)[used]


def spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of ranks; equal values share their mean rank."""
    ranks = [(x[:, None] > x).double().sum(-1) + (x[:, None] == x).double().sum(-1) / 2 for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables, then the JSON line."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--text", type=Path, default=asset("demo", "heldout.md"))
    options = parser.parse_args(arguments)
    checkpoint: Path = options.checkpoint or source()
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(options.text.read_text("utf-8")).ids
    family = FAMILIES[model.config.model_type]
    if family.experts_by != "silu" or family.biased:
        parser.error(f"the experts of {family.called} are no SwiGLU without biases")
    layers = [Seen(block.experts) for block in family.blocks(model)]
    with torch.inference_mode():
        for window in torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW):
            model.eval().model(input_ids=window[None], use_cache=False)
    dropped = torch.stack([layer.dropped() for layer in layers])  # (L, thresholds)
    print("dropped below" + "".join(f"{threshold:>8}" for threshold in THRESHOLDS))
    for name, row in [*((f"layer {n + 1}", row) for n, row in enumerate(dropped)), ("all", dropped.mean(0))]:
        print(f"{name:<13}" + "".join(f"{share:8.1%}" for share in row.tolist()))
    pairs = [layer.negative() for layer in layers]
    loads, shares = (torch.cat(each) for each in zip(*pairs, strict=True))
    print(f"\n{'load of mean':<16}{'experts':>8}{'sums below 0':>14}")
    quarters = loads.argsort().chunk(4)
    for quarter in quarters:
        span = f"{loads[quarter].min():.2f} to {loads[quarter].max():.2f}"
        print(f"{span:<16}{len(quarter):>8}{shares[quarter].mean():>14.1%}")
    within = [spearman(*pair) for pair in pairs]
    found = {"overall": spearman(loads, shares), "layers": sum(within) / len(within)}
    print("rank correlation " + ", ".join(f"{name} {value:+.2f}" for name, value in found.items()))
    print("by layer         " + ", ".join(f"{value:+.2f}" for value in within))
    print(
        json.dumps(
            {
                "bench": "router_scores",
                "tokens": len(ids) // WINDOW * WINDOW,
                "dropped": dict(zip(map(str, THRESHOLDS), dropped.T.tolist(), strict=True)),
                "negative": [float(shares[quarter].mean()) for quarter in quarters],
                "spearman": found | {"by_layer": within},
            }
        )
    )


if __name__ == "__main__":
    main()
