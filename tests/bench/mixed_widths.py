"""Fewer bits for the experts that are used least (CORM section 4.1): what that costs and saves, on a trained model.

Beside each other: all experts alike; some of them narrow, chosen by popularity on the calibration text (the claim of
CORM), at random, or the most popular ones; and the same bytes spent on all alike. Bytes "stored" are those of all
experts, "up" what the up projections take of device memory, "read" what a token reads of the weights of experts. KL is
the mean divergence of the next-token distribution from that of the 16-bit model, in nats.

Run: .venv/bin/python tests/bench/mixed_widths.py [PACK] [--source FOLDER] [--text FILE]. The last line is one JSON
object. PACK says how popular the experts are; its own widths do not matter.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from floe_chat.engine.candidates import Setting, compute
from floe_chat.engine.divergence import score, summarize
from floe_chat.engine.footprint import Footprint
from floe_chat.engine.tune import in_rows
from floe_chat.engine.windows import cut
from floe_chat.models import calibration
from floe_chat.models.catalog import asset, described
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.pack import PackSpec
from floe_chat.models.packed import PackedModel
from floe_chat.models.widths import Narrow
from tokenizers import Tokenizer

USUAL = Setting(3, 4, 4)
ALIKE = (Setting(4, 4, 4), USUAL, Setting(3, 4, 3), Setting(2, 4, 4), Setting(3, 3, 3), Setting(2, 3, 3))
NARROW = (
    *(Narrow(share, *bits) for share in (0.25, 0.5) for bits in ((2, 3, 3), (2, 4, 4))),
    Narrow(0.5, 3, 3, 3),
)
SEEDS = 4  # random choices, whose mean is told


@dataclass(frozen=True)
class Row:
    """One line of the table: settings whose figures are averaged."""

    choice: str
    settings: tuple[Setting, ...]


def chosen(popularity: list[list[float]], narrow: Narrow, choice: str, seed: int = 0) -> Setting:
    """`USUAL` with some experts of each layer narrow."""
    rare: list[tuple[int, ...]] = []
    for layer, shares in enumerate(popularity):
        order = sorted(range(len(shares)), key=shares.__getitem__, reverse=choice == "most popular")
        if choice == "at random":
            random.Random(f"{seed} {layer}").shuffle(order)
        rare.append(tuple(sorted(order[: narrow.count(len(shares))])))
    return replace(USUAL, narrow=narrow, rare=tuple(rare))


def rows_of(popularity: list[list[float]]) -> list[Row]:
    """The table's lines."""
    rows = [Row("all alike", (setting,)) for setting in ALIKE]
    for narrow in NARROW:
        rows.append(Row("rarest", (chosen(popularity, narrow, "rarest"),)))
        seeds = range(1, 1 + SEEDS)
        rows.append(Row("at random", tuple(chosen(popularity, narrow, "at random", seed) for seed in seeds)))
        rows.append(Row("most popular", (chosen(popularity, narrow, "most popular"),)))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path, nargs="?", default=asset("demo", "packed"))
    parser.add_argument("--source", type=Path, default=asset("demo", "checkpoint"))
    parser.add_argument("--text", type=Path, default=asset("demo", "manual.md"))
    parser.add_argument("--tokens", type=int, default=4096, help="to read, half of which are predicted")
    options = parser.parse_args(arguments)
    checkpoint, pack = Checkpoint(options.source), PackedModel.open(options.pack)
    popularity: list[list[float]] = pack.profile()["popularity"].tolist()
    ids = Tokenizer.from_file(str(options.pack / "tokenizer.json")).encode(options.text.read_text("utf-8")).ids
    windows, keep = cut(ids, checkpoint.config, options.tokens)
    passages = in_rows(calibration.read_tokens(options.pack, asset("calibration.txt").read_text("utf-8")), windows)
    rows = rows_of(popularity)
    settings = [Setting(), *(setting for row in rows for setting in row.settings)]
    with torch.inference_mode():
        outcomes = compute(checkpoint, settings, passages, windows[:, :-1], keep, lambda _step: None)
        expected = outcomes[0].logits()
        found = {outcome.setting: outcome for outcome in outcomes}
        divergence = {
            outcome.setting: summarize(
                [score(*each) for each in zip(outcome.logits(), expected, windows[:, -keep:], strict=True)]
            )
            for outcome in outcomes[1:]
        }
    sizes = described(options.pack).sizes
    shares = torch.tensor(popularity)
    least, most = (float(part.mean()) for part in (shares.min(1).values, shares.max(1).values))
    print(
        f"{windows.shape[0] * keep} tokens predicted; share of calls of a layer's least and most popular expert, mean"
    )
    print(f"over layers: {least:.1%} and {most:.1%} (alike: {1 / shares.shape[1]:.1%})\n")
    print(f"{'widths':<8}{'narrow':<14}{'which':<14}{'KL':>10}{'same top':>10}{'stored':>10}{'up':>9}{'read':>9}")
    told: list[dict[str, object]] = []
    for row in rows:
        first, count = row.settings[0], len(row.settings)
        spec = PackSpec(first.up, first.gate, first.down, narrow=first.narrow)
        takes = Footprint.of(sizes, spec)
        kl, same, read = (
            sum(values) / count
            for values in (
                [divergence[setting].kl_mean for setting in row.settings],
                [divergence[setting].same_top for setting in row.settings],
                [found[s].taken.nbytes(s, sizes.hidden, sizes.intermediate) for s in row.settings],
            )
        )
        widths = f"{first.up}/{first.gate}/{first.down}"
        n = first.narrow
        narrow = "-" if n is None else f"{n.share:.0%} {n.up}/{n.gate}/{n.down}"
        print(
            f"{widths:<8}{narrow:<14}{row.choice:<14}{kl:>10.5f}{same:>10.2%}{(takes.ups + takes.rows) / 1e6:>7.2f} MB"
            f"{takes.ups / 1e6:>6.2f} MB{read / 1e3:>6.0f} kB"
        )
        figures = {"kl": kl, "same_top": same, "stored": takes.ups + takes.rows, "up": takes.ups, "read": round(read)}
        told.append({"widths": widths, "narrow": narrow, "which": row.choice, **figures})
    print(json.dumps({"bench": "mixed widths", "tokens": windows.shape[0] * keep, "rows": told}))


if __name__ == "__main__":
    main()
