"""A model's size at given widths, in bytes, computed from its architecture, as packing would lay it out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...kernels.activation import UNGATED
from ...kernels.codes import group_size
from ...kernels.entries import CODES, entry_of
from ...kernels.layouts import RowLayout, VectorLayout
from ...models.catalog_entry import AssistantSizes, Counted, Recurrent, Sizes
from ...models.families import family_of
from ...models.families.sizes import sizes_of as family_sizes
from ...models.pack import learned_predictor, table
from ...models.pack.manifest import DRAFT, Manifest
from ...models.pack.quantized_linears import layout_of, width_of
from ...models.packing.pack import PackSpec
from ..decoder.kv_stores import kept, room_for_past


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes in bytes, of one layer unless the name says otherwise.

    Attributes:
        attention: the linear layers beside the experts, for each layer with experts: projections, shared experts, and a
            share of the layers without experts. head: of the whole model. kept: embedding, routers and norms of the
            whole model, which stay at 16 bits. up: one expert's up projection. row: one neuron's record. tables: of the
            whole model (`models/pack/table.py`). draft: the head that guesses further tokens, on the disk and in RAM.
    """

    sizes: Sizes
    spec: PackSpec
    attention: int
    head: int
    kept: int
    up: int
    row: int
    tables: int = 0
    draft: int = 0

    @classmethod
    def of(cls, sizes: Sizes, spec: PackSpec) -> Footprint:
        """At the widths of `spec`; of 16-bit layers too."""
        hidden = sizes.expert_hidden
        gate, down, up = (
            VectorLayout(hidden, bits, group_size(hidden, spec.group), spec.short)
            for bits in (spec.gate, spec.down, spec.up)
        )
        biased, kind = family_of(sizes.model_type).biased, "silu" if sizes.gated else UNGATED
        beside = sum(rows * _vector(columns, spec.dense) for rows, columns in sizes.beside())
        up_bytes = sizes.intermediate * (up.nbytes_apart + (4 if biased else 0))
        row = RowLayout(gate, down, torch.bfloat16, activation=kind, biased=biased).nbytes
        draft = (
            sum(rows * _vector(columns, spec.dense) for rows, columns in sizes.in_draft()) + 2 * sizes.small_of_draft
        )
        draft += sum(rows * _vector(columns, width_of("lm_head", spec.dense)) for rows, columns in sizes.head_of_draft)
        draft += sizes.experts * (up_bytes + sizes.intermediate * row) if sizes.draft == "experts" else 0
        if isinstance(sizes.draft, AssistantSizes) and sizes.draft.nbytes:
            draft = sizes.draft.nbytes
        head = sizes.vocab * _vector(sizes.hidden, width_of("lm_head", spec.dense))
        return cls(
            sizes,
            spec,
            attention=-(-beside // sizes.layers),
            head=0 if sizes.tied and spec.dense == 16 else head,
            kept=2 * (sizes.embedding + sizes.small),
            up=up_bytes,
            row=row,
            tables=sum(rows * table.vector(columns, spec.dense).nbytes for rows, columns, _ in sizes.tables),
            draft=draft if spec.draft else 0,
        )

    @classmethod
    def of_pack(cls, manifest: Manifest, config: Any) -> Footprint:
        """Of a pack; `config`: as config.json has it."""
        w = manifest.widths
        widths = w.up, w.gate, w.down, w.dense, w.group
        draft = DRAFT in manifest.beside
        return cls.of(sizes_of(manifest, config), PackSpec(*widths, short=w.short, draft=draft))

    @property
    def dense(self) -> int:
        """Everything but experts and tables, as stored on the disk."""
        return self.sizes.layers * self.attention + self.head + self.kept

    @property
    def ups(self) -> int:
        """The up projections of all layers."""
        return self.sizes.layers * self.sizes.experts * self.up

    @property
    def row_count(self) -> int:
        """Neurons of all experts of all layers."""
        return self.sizes.layers * self.sizes.experts * self.sizes.intermediate

    @property
    def rows(self) -> int:
        """Bytes of all rows."""
        return self.row_count * self.row

    @property
    def disk(self) -> int:
        """The whole pack, to within its small files."""
        sizes = self.sizes
        inputs = sizes.expert_hidden + sizes.experts + 1
        predictors = 0
        for layer in range(sizes.layers - 1):
            width = learned_predictor.width(layer, sizes.layers, sizes.expert_hidden, sizes.experts)
            predictors += 2 * (inputs * (sizes.experts + width) + sizes.experts * width)
        return self.dense + self.tables + self.ups + self.rows + predictors + self.draft


def sizes_of(manifest: Manifest, config: Any) -> Sizes:
    """Of a pack; `config`: as config.json has it."""
    return with_assistant(family_sizes(family_of(manifest.architecture.model_type), config), manifest)


def with_assistant(sizes: Sizes, manifest: Manifest) -> Sizes:
    """Of a pack, by what its config.json says, which knows nothing of an assistant."""
    file = manifest.beside.get(DRAFT)
    if file is None or manifest.family.assistant is None:
        return sizes
    return replace(sizes, draft=AssistantSizes(nbytes=file.size))


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of keys and values (`kv_stores.py`).

    Attributes:
        whole: of a token in the layers that keep all. windowed: in layers that see the last `sees` tokens. returns:
            whether what leaves windows stays in RAM, to go back to.
    """

    whole: int
    windowed: int = 0
    sees: int = 0
    returns: bool = True

    def of(self, tokens: int) -> int:
        """Of a text, where it is computed."""
        return self.whole * tokens + self.windowed * min(tokens, kept(self.sees))

    def past(self, tokens: int, ram: int) -> int:
        """Of what of a text has left windows, and stays in so much RAM."""
        return min(self.windowed * max(0, tokens - kept(self.sees)), room_for_past(ram)) if self.returns else 0

    def seen(self, tokens: int) -> int:
        """Read for the token behind such a text."""
        return self.whole * tokens + self.windowed * min(tokens, self.sees)

    def tokens(self, nbytes: int, window: int) -> int:
        """Of the longest text that takes no more, within a window."""
        few = nbytes // (self.whole + self.windowed)
        if self.windowed and few >= kept(self.sees):
            few = (nbytes - self.windowed * kept(self.sees)) // self.whole if self.whole else window
        return max(0, min(few, window))

    def times(self, share: float) -> KvBytes:
        """Of so many times as many layers."""
        whole, windowed = math.ceil(self.whole * share), math.ceil(self.windowed * share)
        return replace(self, whole=whole, windowed=windowed)


def kv_bytes(sizes: Sizes, bits: int, element: int = 2) -> KvBytes:
    """Of a model. element: bytes of a number, where they are no codes of 8 bits."""
    if (counted := sizes.counted) is not None:
        return _counted_bytes(sizes, counted, bits, element)
    if sizes.latent is not None:
        return KvBytes(sizes.cached * element)
    each = [
        (layers, math.prod(entry_of(2 * heads, size, CODES)) if bits == 8 else 2 * heads * size * element)
        for layers, heads, size in sizes.caching
    ]
    windowed = 0 if sizes.recurrent else max(0, min(sizes.windowed, each[0][0])) * each[0][1]
    return KvBytes(sum(layers * nbytes for layers, nbytes in each) - windowed, windowed, sizes.sees)


def _counted_bytes(sizes: Sizes, counted: Counted, bits: int, element: int) -> KvBytes:
    """The library's cache has no codes, keeps a window less the next token, and nothing of what has left it."""
    if counted.library:
        return KvBytes(counted.cached * element, counted.windowed * element, counted.sees, returns=False)
    one = 2 * sizes.kv_heads * sizes.head_dim
    layers, windowed = (numbers // one for numbers in (counted.cached, counted.windowed))
    if bits == 8 and one * (layers + windowed) == counted.cached + counted.windowed:  # no latent vectors
        coded = math.prod(entry_of(2 * sizes.kv_heads, sizes.head_dim, CODES))
        return KvBytes(layers * coded, windowed * coded, counted.sees + 1)
    return KvBytes(counted.cached * element, counted.windowed * element, counted.sees + 1)


def state_bytes(sizes: Sizes) -> int:
    """Bytes of a text's states, in all layers that keep one."""
    recurrent = sizes.recurrent
    if sizes.counted is not None:
        return 4 * sizes.counted.state
    if recurrent is None:
        return 0
    one = recurrent.state if isinstance(recurrent, Recurrent) else (recurrent.taps - 1) * sizes.hidden
    return 4 * recurrent.layers * one


def prompt_bytes(sizes: Sizes) -> int:
    """Bytes on a card of what is made of each token of a part of a prompt, at its peak; a bound that is at most about
    twice too large. Scores, masks and experts' products come on top.
    """
    kinds = [sizes.projections()]
    if sizes.wide is not None:
        kinds.append(sizes.wide.projections(sizes.heads, sizes.hidden))
    if sizes.recurrent is not None:
        kinds.append(sizes.recurrent.projections(sizes.hidden))
    widths = [sum(rows for rows, _ in kind) for kind in kinds]
    dense = 2 * max(sizes.shared, sizes.dense_intermediate)
    # Rope's tables of all heads are there for each kind of layers.
    return 2 * (10 * sizes.hidden + max(5 * max(widths), 2 * dense) + 2 * (sum(widths) - max(widths)))


def divisible(model_type: str) -> bool:
    """Whether several cards may have some of a family's layers each."""
    return not family_of(model_type).states


def kv_element(dense: int, sizes: Sizes) -> int:
    """Bytes of a number in the CPU's "16-bit" keys and values, if the dense part has this many bits (see `layers`); the
    library's own cache keeps what its modules compute.
    """
    return 4 if dense == 16 or (sizes.counted is not None and sizes.counted.library) else 2


def _vector(columns: int, bits: int) -> int:
    """Bytes of one row of a dense layer."""
    return 2 * columns if bits == 16 else layout_of(columns, bits).nbytes
