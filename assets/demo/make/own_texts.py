"""Texts of one's own to train on instead of the demo's: every file of a kind in a folder, one in HELD_OUT kept out."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from .batches import ROW_LENGTHS, TOKENS_PER_BATCH, Encoder

HELD_OUT = 20
# Of a Python's library: what others wrote, and what repeats itself.
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "__pycache__"}


@dataclass(frozen=True, slots=True)
class OwnTexts:
    """The files `pattern` of a folder and those in it."""

    folder: Path
    pattern: str = "*.py"

    def read(self, *, held_out: bool) -> list[str]:
        """Those that are trained on, or those that are not, in the order of their names."""
        inside = (path.relative_to(self.folder) for path in sorted(self.folder.rglob(self.pattern)))
        wanted = (name for name in inside if not LEFT_OUT & set(name.parts) and _kept_out(name) == held_out)
        return [(self.folder / name).read_text(encoding="utf-8", errors="replace") for name in wanted]

    def batches(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Endless rows as `batches.batches` gives them, all to be predicted: the texts in ever new order."""
        stream = _ids(Encoder(tokenizer), self.read(held_out=False), random.Random(seed))
        for length in cycle(ROW_LENGTHS):
            rows = [[next(stream) for _ in range(length + 1)] for _ in range(TOKENS_PER_BATCH // length)]
            yield torch.tensor(rows), torch.ones(len(rows), length + 1, dtype=torch.bool)


def _kept_out(name: Path) -> bool:
    return hashlib.sha256(name.as_posix().encode()).digest()[0] % HELD_OUT == 0


def _ids(encoder: Encoder, texts: list[str], rng: random.Random) -> Iterator[int]:
    while True:
        for text in rng.sample(texts, len(texts)):
            yield from encoder.document(text)
