"""Load-aware thresholds (DualSparse-MoE section 4.3) on the demo model, as its figure 11 compares them.

Experts lie in 4 groups. One threshold for experts (1T), two for their
halves (2T), and two that fall with a process's load (2T, load-aware) are compared by what is left out, by the load of
the busiest process, which all others wait for, and by the loss.

    .venv/bin/python tests/bench/balance.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from floe_chat.engine.decoder.decoders import FusedDecoder
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.parallel.holding import Grid
from floe_chat.engine.quality_presets import Preset
from floe_chat.kernels.rule import Rule
from floe_chat.models.catalog import asset
from floe_chat.models.tokenizer.chat_format import ChatFormat
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.engine.parallel.parted import Loads, over

WINDOW, WINDOWS = 128, 32  # tokens of a step, and steps
APART = 0.1  # of both thresholds of 2T from that of 1T; relative to a token's mean weight
THRESHOLDS = (0.3, 0.5, 0.7, 0.9)


def windows() -> list[list[int]]:
    """The manual that the demo was trained on, in steps: of other text it predicts no better than by chance."""
    text = asset("demo", "manual.md").read_text(encoding="utf-8")
    ids = ChatFormat(asset("demo", "packed")).encode_text(text)
    return [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW, WINDOW)][:WINDOWS]


def read(loaded: LoadedModel, steps: list[list[int]], rule: Rule) -> list[Tensor]:
    """Log probabilities (T, V) of each step's next tokens."""
    decoder = loaded.decoder
    assert isinstance(decoder, FusedDecoder)
    loaded.control.preset = Preset("bench", rule, 22)
    return [decoder.read(ids, len(ids), 16).log_softmax(-1) for ids in steps]


def loss(logs: list[Tensor], steps: list[list[int]]) -> float:
    """Mean negative log likelihood, nats."""
    found = [-log[:-1].gather(1, torch.tensor(ids[1:])[:, None]) for log, ids in zip(logs, steps, strict=True)]
    return float(torch.cat(found).mean())


def divergence(exact: list[Tensor], logs: list[Tensor]) -> float:
    """Mean KL divergence from what nothing left out gives, nats."""
    return float(torch.cat([(e.exp() * (e - log)).sum(-1) for e, log in zip(exact, logs, strict=True)]).mean())


def main() -> None:
    """Print the table, and a JSON line."""
    loaded, grid = load(asset("demo", "packed"), None, "cpu", lambda _step, _share: None)[0], Grid("ep", 4, 1)
    steps = windows()
    exact = read(loaded, steps, Rule())
    whole = loss(exact, steps)
    print(f"{len(steps)} steps of {WINDOW} tokens, loss {whole:.4f} with nothing left out")
    print(f"{'':24}{'left out':>9}{'busiest/mean':>14}{'busiest does':>14}{'speedup':>9}{'KL':>9}{'loss':>9}")
    rows: list[dict[str, float | str]] = []
    for threshold in THRESHOLDS:
        two = Rule(drop=threshold - APART, major=threshold + APART)
        for name, rule, balanced in (
            ("1T", Rule(drop=threshold), False),
            ("2T", two, False),
            ("2T, load-aware", two, True),
        ):
            with over(loaded, grid, balanced=balanced) as found:
                logs = read(loaded, steps, rule)
            rows.append(_row(f"{name} {threshold}", found, divergence(exact, logs), loss(logs, steps)))
    print(f"before: busiest/mean {rows[0]['before']:.3f}")
    print(json.dumps(rows))


def _row(name: str, found: Loads, kl: float, nll: float) -> dict[str, float | str]:
    print(
        f"{name:24}{found.dropped:>9.1%}{found.imbalance:>14.3f}{1 / found.gain:>14.1%}{found.gain:>8.2f}x"
        f"{kl:>9.4f}{nll:>9.4f}"
    )
    figures = {"dropped": found.dropped, "imbalance": found.imbalance, "before": found.imbalance_given}
    return {"name": name, **figures, "gain": found.gain, "kl": kl, "loss": nll}


if __name__ == "__main__":
    main()
