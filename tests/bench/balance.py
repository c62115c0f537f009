"""Load-aware thresholds (DualSparse-MoE section 4.3) on the demo model, as its figure 11 compares them.

Experts lie in groups, one per process. One threshold for experts (1T), two for their halves (2T), and two that fall
with a process's load (2T, load-aware) are compared where they leave out the same share: by the load of the busiest
process, which all others wait for, and by the loss. Each one's threshold is found by bisection. The last column is the
difference in KL from the row above, step by step, and its standard error.

    .venv/bin/python tests/bench/balance.py [--groups 2 4] [--dropped 0.15 0.25]
"""

from __future__ import annotations

import argparse
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
HALVINGS = 7  # of the range of thresholds: then the share left out is within 0.3 % of what is wanted
METHODS = {"1T": (0.0, False), "2T": (APART, False), "2T, load-aware": (APART, True)}


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


def divergences(exact: list[Tensor], logs: list[Tensor]) -> Tensor:
    """Each step's mean KL divergence from what nothing left out gives, nats."""
    return torch.stack([(e.exp() * (e - log)).sum(-1).mean() for e, log in zip(exact, logs, strict=True)])


def measure(
    loaded: LoadedModel, grid: Grid, steps: list[list[int]], method: str, threshold: float
) -> tuple[Loads, list[Tensor]]:
    """What each process does, and the outputs."""
    apart, balanced = METHODS[method]
    rule = Rule(drop=threshold - apart, major=threshold + apart if apart else 0.0)
    with over(loaded, grid, balanced=balanced) as loads:
        return loads, read(loaded, steps, rule)


def leaving_out(wanted: float, loaded: LoadedModel, grid: Grid, steps: list[list[int]], method: str) -> float:
    """The threshold at which a method leaves out the wanted share."""
    low, high = APART, 1 - APART
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        dropped = measure(loaded, grid, steps, method, middle)[0].dropped
        low, high = (middle, high) if dropped < wanted else (low, middle)
    return (low + high) / 2


def main() -> None:
    """Print the table, and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--dropped", type=float, nargs="*", default=[0.15, 0.25])
    options = parser.parse_args()
    loaded, _ = load(asset("demo", "packed"), None, "cpu", lambda _step, _share: None)
    steps = windows()
    exact = read(loaded, steps, Rule())
    whole = loss(exact, steps)
    print(f"{len(steps)} steps of {WINDOW} tokens, loss {whole:.4f} with nothing left out")
    print(f"{'':26}{'left out':>9}{'busiest/mean':>14}{'busiest does':>14}{'speedup':>9}{'loss':>9}{'KL':>9}")
    rows: list[dict[str, float | str]] = []
    for groups in options.groups:
        grid = Grid("ep", groups, 1)
        for wanted in options.dropped:
            above: Tensor | None = None
            for method in METHODS:
                threshold = leaving_out(wanted, loaded, grid, steps, method)
                found, logs = measure(loaded, grid, steps, method, threshold)
                kl = divergences(exact, logs)
                change = "" if above is None else _change(kl - above)
                name, above = f"{groups}: {method} {threshold:.2f}", kl
                rows.append(_row(name, found, float(kl.mean()), loss(logs, steps), change) | {"groups": groups})
        print(f"before: busiest/mean {rows[-1]['before']:.3f}")
    print(json.dumps(rows))


def _change(differences: Tensor) -> str:
    return f"  {differences.mean():+.4f} ± {differences.std() / len(differences) ** 0.5:.4f}"


def _row(name: str, found: Loads, kl: float, nll: float, change: str) -> dict[str, float | str]:
    print(
        f"{name:26}{found.dropped:>9.1%}{found.imbalance:>14.3f}{1 / found.gain:>14.1%}{found.gain:>8.2f}x"
        f"{nll:>9.4f}{kl:>9.4f}{change}",
        flush=True,
    )
    figures = {"dropped": found.dropped, "imbalance": found.imbalance, "before": found.imbalance_given}
    return {"name": name, **figures, "gain": found.gain, "kl": kl, "loss": nll, "change": change.strip()}


if __name__ == "__main__":
    main()
