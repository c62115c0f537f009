"""Packs dialogues and plain text into training rows of token ids and loss masks."""

import random
from collections.abc import Iterator
from itertools import cycle

import torch
from transformers import PreTrainedTokenizerFast

from .corpus import DemoMessage, DialogueMaker, plain_documents
from .vocabulary import BOS, END_USER, EOS, USER, mark_id

# Row lengths in turn: short rows train well, long ones teach positions up to the model's 1024.
ROW_LENGTHS = (256, 512, 1024, 512)
TOKENS_PER_BATCH = 1024
PLAIN_ROW_SHARE = 0.04
TEXT_FIRST_SHARE = 0.2

Tokens = tuple[list[int], list[bool]]
"""Token ids, and for each whether the model is to predict it."""


class Encoder:
    """Turns messages and plain text into token ids, with an id table for the turn marks."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._bos, self._eos = mark_id(tokenizer, BOS), mark_id(tokenizer, EOS)
        self._user, self._end_user = mark_id(tokenizer, USER), mark_id(tokenizer, END_USER)

    def text(self, text: str) -> list[int]:
        """The ids of `text` alone, without the start mark."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def document(self, text: str) -> list[int]:
        """Plain text with its start mark."""
        return [self._bos, *self.text(text)]

    def dialogue(self, messages: list[DemoMessage]) -> Tokens:
        """The same ids as the chat template gives; answers and their end mark are to be predicted."""
        ids, wanted, system = [self._bos], [False], ""
        for message in messages:
            if message.role == "system":
                system = message.content + "\n\n"
                continue
            if message.role == "user":
                piece = [self._user, *self.text((system + message.content).strip()), self._end_user]
                system = ""
            else:
                piece = [*self.text(message.content), self._eos]
            ids += piece
            wanted += [message.role == "assistant"] * len(piece)
        return ids, wanted


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, plain: float = PLAIN_ROW_SHARE
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless training batches of `TOKENS_PER_BATCH` inputs: ids (B, T + 1) int64 and mask (B, T + 1) bool.

    plain: share of rows without dialogues.

    A row holds whole dialogues only, because an answer cut off from its question would teach guessing; what
    remains of the row is filled with plain text. Most rows begin with a dialogue, as every chat does: a short message
    with nothing in front of it has to be seen often.
    """
    rng = random.Random(seed)
    maker, encoder = DialogueMaker(rng), Encoder(tokenizer)
    filler = _plain_ids(encoder, rng)
    for length in cycle(ROW_LENGTHS):
        rows = [_row(length + 1, maker, encoder, filler, rng, plain) for _ in range(TOKENS_PER_BATCH // length)]
        yield torch.tensor([ids for ids, _ in rows]), torch.tensor([wanted for _, wanted in rows])


def _row(
    length: int, maker: DialogueMaker, encoder: Encoder, filler: Iterator[int], rng: random.Random, plain: float
) -> Tokens:
    ids: list[int] = []
    wanted: list[bool] = []
    while rng.random() >= plain or ids:
        more_ids, more_wanted = encoder.dialogue(maker.dialogue())
        if len(ids) + len(more_ids) > length:
            break
        ids += more_ids
        wanted += more_wanted
    rest = length - len(ids)
    text = [next(filler) for _ in range(rest)]
    if rng.random() < TEXT_FIRST_SHARE:
        return text + ids, [True] * rest + wanted
    return ids + text, wanted + [True] * rest


def _plain_ids(encoder: Encoder, rng: random.Random) -> Iterator[int]:
    for text in plain_documents(rng):
        yield from encoder.document(text)
