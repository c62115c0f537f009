"""Prompts whose answers do not hang on the last bit of a number.

Two paths that sum in another order differ by float32 noise. Where a neuron's |up · x| lies at its threshold within that
noise, they keep different neurons, and what follows differs by much more: on which machine that happens depends on the
order in which its libraries sum (MKL, torch's own kernels, ours). So a test that compares two paths takes a prompt from
`clear_prompt`, which measures on this machine how close each decision of a run is and takes the first prompt without a
close one. `jitter` is such noise, to show that nothing hangs on it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from floe_chat.engine.experts.moe_layer import MoELayer
from floe_chat.engine.loader import LoadedModel
from floe_chat.models.families import FAMILIES
from torch import Tensor

CLEAR = 1.5e-5
"""Of a threshold. Two paths' signals differ by about 1e-6 of it at most, see the tests with `jitter`; of one product in
30 prompts they were seen to fall on both sides of a limit 1.2e-5 away."""
T = TypeVar("T")


class Margins:
    """How close the decisions of a run were.

    Attributes:
        least: the smallest |value / limit - 1| of all: of |up · x|, of |silu(gate · x) up · x| and of the router's
            weights, relative to their mean, by which experts and halves are left out. where: of which decision that is.
    """

    def __init__(self) -> None:
        self.least = float("inf")
        self.where = ""
        self._experts: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = {}

    def step(self, layer: MoELayer, x: Tensor, index: Tensor, weights: Tensor) -> None:
        """One step of a layer: x (B, H), index and weights (B, K)."""
        ruled, rule = layer.in_force(), layer.control.preset.rule
        shares = weights.double() / weights.double().mean(-1, keepdim=True)
        for name, limit in (("drop", rule.drop), ("major", rule.major)):
            self._note(f"{name} of layer {layer.index}", shares, torch.tensor(limit))
        work = ruled.work(index, weights)
        products = [None] * len(work.thresholds) if work.products is None else work.products
        calls = zip(work.calls.tokens.tolist(), work.calls.experts.tolist(), strict=True)
        for (token, expert), limit, product in zip(calls, work.thresholds, products, strict=True):
            if limit == torch.inf:
                continue  # left out
            up, gate = self._dense(layer, expert)
            v = up @ x[token].float()
            self._note(f"a threshold of layer {layer.index}", v.abs(), limit)
            if product is not None:
                h = F.silu(gate @ x[token].float()) * v
                self._note(f"a product of layer {layer.index}", h[v.abs() >= limit].abs(), product)

    def _dense(self, layer: MoELayer, expert: int) -> tuple[Tensor, Tensor]:
        ruled = layer.ruled
        key = layer.index, expert, ruled.rule.parts == 2
        if key not in self._experts:
            up, rows = ruled.layer.signal, ruled.layer.rows
            gate, _ = rows.layout.read(rows.data[expert], torch.float32)
            self._experts[key] = up.dense(expert, torch.float32), gate
        return self._experts[key]

    def _note(self, where: str, values: Tensor, limit: Tensor) -> None:
        if values.numel() and 0 < float(limit) < float("inf"):
            least = float((values.double() / float(limit) - 1).abs().min())
            if least < self.least:
                self.least, self.where = least, where


def layers_of(loaded: LoadedModel) -> list[MoELayer]:
    return [block.experts for block in FAMILIES[loaded.model.config.model_type].blocks(loaded.model)]


@contextmanager
def watched(loaded: LoadedModel) -> Generator[Margins]:
    """How close the decisions of what runs meanwhile are."""
    margins = Margins()

    def note(layer: Any, given: tuple[Tensor, Tensor, Tensor]) -> None:
        margins.step(layer, *given)

    handles = [layer.register_forward_pre_hook(note) for layer in layers_of(loaded)]
    try:
        yield margins
    finally:
        for handle in handles:
            handle.remove()


def prompt_of(seed: int, length: int = 41) -> list[int]:
    """Random tokens: a first one that all share may bring the same neuron to its threshold in each of them."""
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def clear_prompt(
    loaded: LoadedModel,
    run: Callable[[list[int]], T],
    prompts: Sequence[list[int]] = tuple(prompt_of(seed) for seed in range(3, 63)),
) -> tuple[list[int], T]:
    """The first prompt with which no decision of `run` is close, and what it returned; fails if there is none."""
    closest: list[str] = []
    for prompt in prompts:
        with watched(loaded) as margins:
            found = run(prompt)
        if margins.least > CLEAR:
            return prompt, found
        closest.append(f"{margins.where}: {margins.least:.1e}")
    raise AssertionError(f"each of {len(prompts)} prompts brings a neuron to its threshold: {'; '.join(closest)}")
