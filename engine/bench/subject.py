"""A measured model: a pack, or one made in memory (synthetic.py), whole or only its first layers.

Answers go through `generate`, so that embedding, attention, norms, router, experts, head, KV cache, drawing a token
and Python itself all count.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...models.errors import UsageError
from ...models.pack.manifest import Manifest
from ...models.packing.calibration import read_tokens
from ..decoder.decoders import Decoder, choose
from ..decoder.quantized_linear import PackedLinear, PlanedLinear
from ..events import Sampling
from ..experts.moe_layer import Control, MoELayer
from ..generate import KVCache, generate
from ..loader import load
from ..telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """What one answer took, in seconds.

    Attributes:
        prefill: until the prompt is in the KV cache. first: until the first token was drawn. token: the median of the
            tokens after it. read: bytes that each of those had to read. active: the share of its experts' neurons
            that was active, None where there were none.
    """

    prefill: float
    first: float
    token: float
    read: float
    active: float | None


@dataclass(slots=True)
class Subject:
    """A model with its control and its telemetry."""

    name: str
    model: Any
    manifest: Manifest
    control: Control
    telemetry: Telemetry
    window: int
    device: str
    text: Sequence[int] | None = None
    decoder: Decoder = field(init=False)

    def __post_init__(self) -> None:
        self.decoder = choose(self.model, self.window)

    @property
    def layers(self) -> int:
        return len(self.model.model.layers)

    @property
    def fewest(self) -> int:
        """How many of the first layers stand for all of them: the shortest start that has every kind of layer and
        leaves whole periods (of three layers with linear attention and one with full attention, four). Where kinds
        have no period, the shortest start that has every kind.
        """
        kinds = [_kind(layer) for layer in self.model.model.layers]
        every = max(map(kinds.index, kinds)) + 1
        for period in range(1, len(kinds) // 2 + 1):  # it fits twice, or the last layer is like the first by chance
            if kinds[period:] == kinds[:-period]:
                return every + (len(kinds) - every) % period
        return every

    def describe(self) -> str:
        """In words: name, layers and widths."""
        return f"{self.name}, {self.layers} layers, {self.manifest.describe()}"

    @contextmanager
    def first_layers(self, count: int) -> Generator[None]:
        """The model's first `count` layers: it runs as many as its configuration says."""
        config: Any = self.model.config
        whole = config.num_hidden_layers
        config.num_hidden_layers = count
        try:
            yield
        finally:
            config.num_hidden_layers = whole

    def prompt(self, tokens: int) -> list[int]:
        """`tokens` ids: the calibration text by the pack's tokenizer, random ones where the model has no tokenizer.

        Raises:
            UsageError: so many that no answer fits the window.
        """
        if tokens >= self.window // 2:
            raise UsageError(
                f"A prompt of {tokens} tokens leaves no room",
                f"The window of {self.name} holds {self.window} tokens.",
                f"Give --tokens at most {self.window // 2 - 1}.",
            )
        if self.text is None:
            vocabulary = self.model.config.vocab_size
            return torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
        return (list(self.text) * (tokens // len(self.text) + 1))[:tokens]

    def weight_bytes(self, layers: int, *, experts: float) -> int:
        """Bytes of all weights that the first `layers` and the head multiply by, counting that share of the experts'
        weights.
        """
        later = {module for layer in self.model.model.layers[layers:] for module in layer.modules()}
        if isinstance(self.model.lm_head, PlanedLinear):
            later.add(self.model.lm_head.low)  # of which a few rows are read
        return sum(_weights(module, experts) for module in self.model.modules() if module not in later)

    def answer(self, prompt: Sequence[int], tokens: int) -> AnswerTimes:
        """Answer once with a first token and `tokens` more."""
        kv, began = KVCache(), time.perf_counter()
        self.telemetry.begin(0, len(prompt), began)
        steps = generate(
            self.decoder,
            kv,
            prompt,
            Sampling(seed=0),  # as in a chat: how tokens are drawn decides how much of the head is read
            max_new_tokens=tokens + 1,
            stop_ids=(),
            window=self.window,
            control=self.control,
            telemetry=self.telemetry,
        )
        times: list[float] = []
        prefill = first = 0.0
        last = began
        for step in steps:
            torch.get_device_module(self.device).synchronize(self.device)  # a prompt's step ends before the device does
            now = step.at or time.perf_counter()
            if step.token is None:
                prefill = now - began
            elif not first:
                first = now - began
            else:
                times.append(now - last)
            last = now
        stats = self.telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=self.window)
        middle = sorted(times)[len(times) // 2] if times else 0.0
        a = self.manifest.architecture
        # transformers' own experts count nothing: they read each chosen expert whole.
        uncounted = 0.0 if stats.bytes_per_token else a.top_k / a.experts
        weights = self.weight_bytes(self.model.config.num_hidden_layers, experts=uncounted)
        read = weights + kv.nbytes() + (stats.bytes_per_token or 0.0)
        return AnswerTimes(prefill, first, middle, read, stats.active_neurons)


def from_pack(folder: Path, device: str, text: str) -> Subject:
    """A pack, computed as in a chat; prompts are made from `text`. Its modules and its configuration are those of
    transformers: a benchmark cuts them to the first layers, or builds a model beside it from them.

    Raises:
        FloeError: what `load` raises.
    """
    loaded, event = load(folder, None, device, lambda _step, _share: None, library=True)
    ids = read_tokens(folder, text).flatten().tolist()
    return Subject(
        event.model,
        loaded.model,
        loaded.packed.manifest,
        loaded.control,
        loaded.telemetry,
        loaded.window,
        loaded.device,
        ids,
    )


def _kind(layer: nn.Module) -> list[tuple[str, int]]:
    """The parts of a layer, and bytes that each reads besides experts: equal for layers that work alike."""
    return [(name, sum(_weights(module, 0.0) for module in part.modules())) for name, part in layer.named_children()]


def _weights(module: nn.Module, experts: float) -> int:
    """Bytes that the module itself holds and multiplies by; a lookup table is not read whole."""
    match module:
        case PackedLinear():
            return module.weights.nbytes
        case MoELayer():
            return int(experts * (module.packed.signal.nbytes + module.packed.rows.data.nbytes))
        case nn.Embedding():
            return 0
        case _:
            held = sum(parameter.nbytes for parameter in module.parameters(recurse=False))
            return int(experts * held) if hasattr(module, "gate_up_proj") else held
