"""Which part of an expert may be left out: the papers' orderings on a small trained model.

FloE figure 3a and theorem 3.1: of an expert's neurons the quietest are left out, judged by what enters down ("down"),
by |up · x| or by |silu(gate · x)|, each token for itself and without any threshold table. DualSparse-MoE table 2 and
importance-driven scheduling table 3: experts left out, or replaced by resident ones, by their router score; only
routers of probabilities replace experts. The rise of the loss (nats per token) and the mean KL divergence from the
whole model are printed, then by which projection each layer alone loses less.

Run: .venv/bin/python tests/bench/orderings.py [CHECKPOINT] [--text FILE], of any family whose experts are
SwiGLU; by default the demo's 16-bit source, which `make demo` makes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from floe_chat.assets.demo.make import source
from floe_chat.engine.experts import substitution
from floe_chat.engine.quality.half_resident import RESIDENT_SHARE
from floe_chat.models.catalog import asset
from floe_chat.models.families import FAMILIES
from tokenizers import Tokenizer
from torch import Tensor, nn

WINDOW = 256
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
DROPS = (0.2, 0.4, 0.6, 0.8)  # of the mean score of a token's experts
ALPHAS = (0.1, 0.3, 0.5)
ONE_LAYER = 0.6  # share of neurons left out of one layer alone

Judge = Callable[[Tensor, Tensor], Tensor]  # silu(gate · x) and up · x, both (T, F) -> how loud each neuron is
JUDGES: dict[str, Judge] = {
    "down": lambda gate, up: (gate * up).abs(),
    "up": lambda _gate, up: up.abs(),
    "gate": lambda gate, _up: gate.abs(),
}


@dataclass
class Rule:
    """What is left out, in one layer or in all. `left` counts expert calls dropped or replaced, of `calls`."""

    judge: Judge | None = None
    share: float = 0.0
    drop: float = 0.0
    alpha: float = 0.0
    calls: int = 0
    left: int = 0
    layer: int | None = None


class Experts(nn.Module):
    """A layer's experts in float32, by a rule that may change."""

    def __init__(self, whole: Any, router: Any, rule: Rule, layer: int, *, normalized: bool) -> None:
        super().__init__()
        self.gate, self.up = whole.gate_up_proj.chunk(2, 1)
        self.down, self.router, self.rule, self.layer = whole.down_proj, router.weight, rule, layer
        self.normalized = normalized
        self.resident = substitution.Residency(round(RESIDENT_SHARE * len(self.gate)))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden (B, H), index and weights (B, K) -> (B, H)."""
        rule = self.rule
        rule.calls += index.numel()
        if rule.alpha:
            scores = F.linear(hidden, self.router).softmax(-1)
            before, (index, weights) = (
                index,
                substitution.substitute_all(
                    scores, index, weights, self.resident, rule.alpha, normalized=self.normalized
                ),
            )
            rule.left += int((index[:, :, None] != before[:, None]).all(-1).sum())
        if rule.drop:
            gone = weights < rule.drop * weights.mean(-1, keepdim=True)
            rule.left += int(gone.sum())
            weights = weights.masked_fill(gone, 0.0)
        out = torch.zeros_like(hidden)
        for expert in range(len(self.gate)):
            token, slot = (index == expert).nonzero(as_tuple=True)
            gate, up = F.silu(F.linear(hidden[token], self.gate[expert])), F.linear(hidden[token], self.up[expert])
            inner = gate * up
            if rule.judge is not None and rule.layer in (None, self.layer):
                loud = rule.judge(gate, up)
                kept = loud.shape[1] - round(rule.share * loud.shape[1])
                inner = torch.zeros_like(inner).scatter(1, (best := loud.topk(kept, 1).indices), inner.gather(1, best))
            out.index_add_(0, token, F.linear(inner, self.down[expert]) * weights[token, slot, None])
        return out


def measure(model: Any, tokens: Tensor, rule: Rule, told: Rule, whole: Tensor | None) -> tuple[Tensor, float, float]:
    """Log probabilities by a rule, the loss, and the KL divergence from `whole` (0 without it)."""
    for name in ("judge", "share", "drop", "alpha", "layer"):
        setattr(rule, name, getattr(told, name))
    rule.calls = rule.left = 0
    logits = [model(input_ids=window[None], use_cache=False).logits[0, :-1] for window in tokens]
    logs = torch.cat(logits).log_softmax(-1)
    loss = float(F.nll_loss(logs, tokens[:, 1:].flatten()))
    kl = 0.0 if whole is None else float((whole.exp() * (whole - logs)).sum(-1).mean())
    return logs, loss, kl


def by_layer(model: Any, tokens: Tensor, rule: Rule, whole: Tensor, layers: int) -> list[dict[str, float]]:
    """The KL divergence where one layer alone leaves out ONE_LAYER of its neurons, by each judge; printed."""
    print(f"\nKL, {ONE_LAYER:.0%} of one layer" + "".join(f"{name:>10}" for name in JUDGES) + "   gate / up")
    found: list[dict[str, float]] = []
    for layer in range(layers):
        row = {
            name: measure(model, tokens, rule, Rule(judge, ONE_LAYER, layer=layer), whole)[2]
            for name, judge in JUDGES.items()
        }
        ratio = row["gate"] / row["up"]
        print(f"{layer + 1:<21}" + "".join(f"{kl:10.5f}" for kl in row.values()) + f"{ratio:12.2f}", flush=True)
        found.append({name: round(kl, 6) for name, kl in row.items()})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, then the JSON line."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--text", type=Path, default=asset("demo", "manual.md"))
    parser.add_argument("--windows", type=int, default=8, help=f"of {WINDOW} tokens, at the most")
    options = parser.parse_args(arguments)
    checkpoint: Path = options.checkpoint or source()
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(options.text.read_text("utf-8")).ids
    count = min(options.windows, len(ids) // WINDOW)
    tokens = torch.tensor(ids[: count * WINDOW]).view(count, WINDOW)
    family = FAMILIES[model.config.model_type]
    if family.experts_by != "silu" or family.biased:
        parser.error(f"the experts of {family.called} are no SwiGLU without biases")
    rule, blocks = Rule(), family.blocks(model)
    for place, block in enumerate(blocks):
        router = family.router(block)
        block.experts = Experts(block.experts, router, rule, place, normalized=family.normalizes(router))
    found: dict[str, Any] = {"bench": "orderings", "tokens": tokens.numel()}
    with torch.inference_mode():
        whole, base, _ = measure(model.eval(), tokens, rule, Rule(), None)
        print(f"loss of the whole model {base:.4f}\n\nneurons left out   " + "".join(f"{name:>18}" for name in JUDGES))
        for share in SHARES:
            row = {}
            for name, judge in JUDGES.items():
                _, loss, kl = measure(model, tokens, rule, Rule(judge, share), whole)
                row[name] = (round(loss - base, 5), round(kl, 5))
            print(f"{share:<18.0%} " + "".join(f"{f'{r:+.4f} / {kl:.4f}':>18}" for r, kl in row.values()), flush=True)
            found[f"sparsity {share}"] = row
        rules = [("drop", limit, Rule(drop=limit)) for limit in DROPS]
        if family.routing.kind == "softmax":
            rules += [("alpha", limit, Rule(alpha=limit)) for limit in ALPHAS]
        print("\nexperts            left out or replaced     loss / KL")
        for what, limit, told in rules:
            _, loss, kl = measure(model, tokens, rule, told, whole)
            left, rise = rule.left / rule.calls, loss - base
            print(f"{what:<6}{limit:<12} {left:20.1%}   {rise:+.4f} ({rise / base:+.1%}) / {kl:.4f}", flush=True)
            found[f"{what} {limit}"] = {"left": round(left, 4), "loss": round(rise, 5), "kl": round(kl, 5)}
        found["layers"] = by_layer(model, tokens, rule, whole, len(blocks))
    print(json.dumps(found | {"loss": round(base, 5)}))


if __name__ == "__main__":
    main()
