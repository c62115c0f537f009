"""A model's description without its weights: sizes, licence, terms, and whether it can chat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .quantities import size

SHARD_BYTES = 5_000_000_000  # the largest shard of published checkpoints
STRETCH = 64 << 20  # bytes that are fetched of a GGUF file together, if a layer does not have more
OFFERED = "Q4_K_M"  # the rounding that lists offer
GGUF_BITS = {"Q8_0": 8.5, "Q6_K": 6.57, "Q5_K_M": 5.7, "Q4_K_M": 4.86}  # of a weight, in whole published files


Matrix = tuple[int, int]  # rows and columns of a linear layer's weight


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention through a latent vector (DeepSeek-V2, section 2.1), whose keys and values are made of it again.

    Attributes:
        queries: size of the latent vector of queries; 0 where there is none. keys: that of keys and values, which is
            cached. rope: dimensions of a key that turn, cached too. value: dimensions of a value.
    """

    queries: int
    keys: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers of gated delta rules (arXiv 2412.06464), which keep a state of one size and no keys and values.

    Attributes:
        layers: how many. keys, values: numbers of a token's keys, and of its values. heads: of values. key_dim: numbers
            of a head's key. taps: of the convolution before them.
    """

    layers: int
    keys: int
    values: int
    heads: int
    key_dim: int
    taps: int

    @property
    def state(self) -> int:
        """Numbers of one layer's state."""
        return (self.taps - 1) * (2 * self.keys + self.values) + self.key_dim * self.values

    def projections(self, hidden: int) -> list[Matrix]:
        """One layer's."""
        return [(2 * self.keys + 2 * self.values, hidden), (hidden, self.values)]

    def small(self, hidden: int) -> int:
        """One layer's other weights, which every pack stores as they are."""
        own = 2 * self.heads * hidden + 2 * self.heads + self.values // self.heads
        return own + self.taps * (2 * self.keys + self.values)


@dataclass(frozen=True, slots=True)
class Convolutions:
    """Layers of short gated convolutions (LFM2), which keep their last inputs and no keys and values.

    Attributes:
        layers: how many. taps: of a convolution. biased: whether it and its projections have biases.
    """

    layers: int
    taps: int
    biased: bool = False

    def projections(self, hidden: int) -> list[Matrix]:
        """One layer's."""
        return [(3 * hidden, hidden), (hidden, hidden)]

    def small(self, hidden: int) -> int:
        """One layer's other weights, which every pack stores as they are."""
        return hidden * (self.taps + (5 if self.biased else 0))


@dataclass(frozen=True, slots=True)
class Wide:
    """Layers whose attention sees all tokens, with other heads than the layers that see a window (Gemma 4).

    Attributes:
        layers: how many. keys_alone: whether values are made of what keys are made of, without a projection of their
            own.
    """

    layers: int
    kv_heads: int
    head_dim: int
    keys_alone: bool

    def projections(self, heads: int, hidden: int) -> list[Matrix]:
        """One layer's."""
        queries, keys = heads * self.head_dim, self.kv_heads * self.head_dim
        return [(queries + (1 if self.keys_alone else 2) * keys, hidden), (hidden, queries)]


@dataclass(frozen=True, slots=True)
class Counted:
    """What is not experts of a model that is none of the usual ones, counted tensor by tensor.

    Attributes:
        linears: the linear layers that a pack may store at low width, of all layers, without the head. small: numbers
            that every pack stores as they are, without the embedding. cached: numbers that all layers cache of every
            token. state: numbers that they keep of a text whatever its length. windowed: numbers that they cache of a
            token besides, of the last `sees` tokens alone. tables: rows and columns of each embedding besides the
            vocabulary's, and how many rows a token looks up. library: why transformers' modules compute it; "" where
            the engine's own pass does.
    """

    linears: tuple[Matrix, ...]
    small: int
    cached: int
    state: int
    windowed: int = 0
    sees: int = 0
    tables: tuple[tuple[int, int, int], ...] = ()
    library: str = ""


@dataclass(frozen=True, slots=True)
class AssistantSizes:
    """A small model that guesses another one's tokens by that one's keys and values (`families.family.Assistant`).

    Attributes:
        layers: how many. wide: how many of them see all tokens; heads are the other model's. intermediate: neurons of
            each layer. nbytes: of its file in a pack, of which nothing else is known; else 0.
    """

    hidden: int = 0
    intermediate: int = 0
    layers: int = 0
    wide: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """An architecture.

    Attributes:
        layers: those with experts. dense_layers: those without, `dense_intermediate` neurons wide.
        head_dim: of queries and keys. window: most tokens of prompt and answer together. tied: whether the head is the
            embedding.
        head_norms: weights of a layer's norms of queries and keys. biases: of the whole model's projections and norms.
        shared: neurons of a layer's shared expert. shared_gate: whether a gate scales it. router_bias: whether a bias
            corrects its router's choice.
        latent: None where all heads of keys and values are cached. recurrent: None where all layers are attention.
        gated_heads: whether the queries' projection also gives a gate of each output. wide: layers of other heads.
        windowed: how many of the other layers see only the last `sees` tokens.
        counted: instead of all that says something about what is not experts; None for the usual models.
        gated: whether experts have a gate. latent_experts: how many numbers they see, if not `hidden`; else 0.
        draft: what the layer of the head has that guesses further tokens, or what model does that instead; "" where
            neither is known of.
    """

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int
    tied: bool = False
    head_norms: int = 0
    biases: int = 0
    dense_layers: int = 0
    dense_intermediate: int = 0
    shared: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    latent: Latent | None = None
    recurrent: Recurrent | Convolutions | None = None
    gated_heads: bool = False
    wide: Wide | None = None
    windowed: int = 0
    sees: int = 0
    counted: Counted | None = None
    gated: bool = True
    latent_experts: int = 0
    draft: Literal["", "experts", "dense"] | AssistantSizes = ""

    @property
    def decoder_layers(self) -> int:
        """With experts and without."""
        return self.layers + self.dense_layers

    @property
    def attending(self) -> int:
        """Layers with attention, whose keys and values are cached."""
        return self.decoder_layers - (self.recurrent.layers if self.recurrent else 0)

    @property
    def caching(self) -> list[tuple[int, int, int]]:
        """Layers, the heads of keys that each of them caches of a token, and their size; of values as many."""
        wide = self.wide
        usual = self.attending - (wide.layers if wide else 0), self.kv_heads, self.head_dim
        return [usual, (wide.layers, wide.kv_heads, wide.head_dim)] if wide else [usual]

    @property
    def cached(self) -> int:
        """Numbers that all layers cache of a token, while they keep it."""
        if self.counted is not None:
            return self.counted.cached + self.counted.windowed
        if self.latent is not None:
            return self.attending * (self.latent.keys + self.latent.rope)
        return sum(layers * 2 * heads * size for layers, heads, size in self.caching)

    def projections(self) -> list[Matrix]:
        """One layer's attention."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if (latent := self.latent) is None:
            asked = 2 * queries if self.gated_heads else queries
            return [(asked + 2 * keys, self.hidden), (self.hidden, queries)]
        asked = (
            [(latent.queries, self.hidden), (queries, latent.queries)] if latent.queries else [(queries, self.hidden)]
        )
        made = self.heads * (self.head_dim - latent.rope + latent.value)
        kept = [(latent.keys + latent.rope, self.hidden), (made, latent.keys)]
        return [*asked, *kept, (self.hidden, self.heads * latent.value)]

    def beside(self) -> list[Matrix]:
        """All that a token reads besides experts and the head, of all layers."""
        if self.counted is not None:
            return list(self.counted.linears)
        found = self.caching[0][0] * self.projections()
        if self.wide is not None:
            found += self.wide.layers * self.wide.projections(self.heads, self.hidden)
        if self.recurrent is not None:
            found += self.recurrent.layers * self.recurrent.projections(self.hidden)
        found += self.layers * self._swiglu(self.shared)
        return found + self.dense_layers * self._swiglu(self.dense_intermediate)

    def in_draft(self) -> list[Matrix]:
        """The drafting head's matrices besides experts and its own output layer; nothing without one."""
        if not self.draft:
            return []
        if isinstance(own := self.draft, AssistantSizes):
            dims = [self.head_dim] * (own.layers - own.wide) + [self.wide.head_dim if self.wide else 0] * own.wide
            found = [(own.hidden, 2 * self.hidden), (self.hidden, own.hidden)] if own.hidden else []
            for queries in (self.heads * dim for dim in dims):
                found += [(queries, own.hidden), (own.hidden, queries)]
                found += [(2 * own.intermediate, own.hidden), (own.hidden, own.intermediate)]
            return found
        neurons = self.shared if self.draft == "experts" else self.dense_intermediate
        return [(self.hidden, 2 * self.hidden), *self.projections(), *self._swiglu(neurons)]

    @property
    def head_of_draft(self) -> list[Matrix]:
        """Its own output layer's matrix, where it is a model."""
        own = self.draft.hidden if isinstance(self.draft, AssistantSizes) else 0
        return [(self.vocab, own)] if own else []

    def _swiglu(self, neurons: int) -> list[Matrix]:
        return [(2 * neurons, self.hidden), (self.hidden, neurons)] if neurons else []

    @property
    def attention(self) -> int:
        """Weights of that, for each layer with experts."""
        return self.in_beside // self.layers

    @property
    def in_beside(self) -> int:
        """Weights of those matrices."""
        return sum(rows * columns for rows, columns in self.beside())

    @property
    def embedding(self) -> int:
        """Weights of the embedding; the head has as many."""
        return self.vocab * self.hidden

    @property
    def small(self) -> int:
        """Numbers of 16 bits of all routers, norms and biases, which every pack stores as they are."""
        if self.counted is not None:
            return self.counted.small
        router, latent = self._router, self._latent_norms
        norms = self.attending * (self.head_norms + latent) + self.decoder_layers * 2 * self.hidden + self.hidden
        norms += self.wide.layers * (2 * self.wide.head_dim - self.head_norms) if self.wide else 0
        state = self.recurrent.layers * self.recurrent.small(self.hidden) if self.recurrent else 0
        return self.layers * router + norms + self.biases + state

    @property
    def small_of_draft(self) -> int:
        """The same of the drafting head."""
        if not self.draft:
            return 0
        if isinstance(own := self.draft, AssistantSizes):
            dims = (own.layers - own.wide) * self.head_dim + own.wide * (self.wide.head_dim if self.wide else 0)
            return own.layers * (4 * own.hidden + 1) + dims + own.hidden
        router = self._router if self.draft == "experts" else 0
        return router + self.head_norms + self._latent_norms + 5 * self.hidden + self.biases // self.decoder_layers

    @property
    def _router(self) -> int:
        """One layer's."""
        return self.experts * (self.hidden + (2 if self.router_bias else 0)) + (self.hidden if self.shared_gate else 0)

    @property
    def _latent_norms(self) -> int:
        return self.latent.queries + self.latent.keys if self.latent else 0

    @property
    def tables(self) -> tuple[tuple[int, int, int], ...]:
        """See `Counted`."""
        return () if self.counted is None else self.counted.tables

    @property
    def in_tables(self) -> int:
        """Weights of these."""
        return sum(rows * columns for rows, columns, _ in self.tables)

    @property
    def parameters(self) -> int:
        """All weights; a tied head counts once."""
        heads = 1 if self.tied else 2
        return self.in_beside + self.in_experts + heads * self.embedding + self.small + self.in_tables

    @property
    def in_expert(self) -> int:
        """Weights of an expert's matrices."""
        return (3 if self.gated else 2) * self.expert_hidden * self.intermediate

    @property
    def expert_hidden(self) -> int:
        """How many numbers of a token experts see."""
        return self.latent_experts or self.hidden

    @property
    def in_experts(self) -> int:
        """Weights of all experts' matrices."""
        return self.in_expert * self.layers * self.experts

    @property
    def active(self) -> int:
        """Weights that a token reads: all but the embedding, tables, and the experts that it does not use."""
        idle = self.in_expert * self.layers * (self.experts - self.top_k)
        return self.parameters - idle - self.in_tables - (0 if self.tied else self.embedding)


GROUP = 64  # weights of an expert that share a scale in a pack, unless asked otherwise


@dataclass(frozen=True, slots=True)
class ReadyPack:
    """A pack that can be fetched as it is, by its own account.

    Attributes:
        place: its repository (owner/name), address or folder. bytes: of all files. up, gate, down, dense, group, short:
            see `PackSpec`. by: who offers it, "" for a folder. commit: of its repository. digest: the sha256 of its
            manifest.json; "" of a listed one that has not been looked up.
        source, source_commit: what it was packed from. draft: whether it has a drafting head. presets: those that were
            measured on it, with their KL in nats.
    """

    place: str
    bytes: int
    up: int
    gate: int
    down: int
    dense: int
    group: int = GROUP
    short: bool = True
    by: str = ""
    commit: str = ""
    digest: str = ""
    source: str = ""
    source_commit: str = ""
    draft: bool = False
    presets: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model's description without its weights.

    Attributes:
        name: on our command line. repo: on the hub; None for a model that is known by its folder alone.
        folder: where it is stored on this machine, or None; of a GGUF file, its path. packed: whether that is a pack
            already.
        licence: as its publisher states it, "" if unknown. gated: whether the publisher requires its terms to be
            accepted first, as last known; the hub decides at run time. chat: how turns are written, in words; None for
            a base model, which has no chat template; "" if unknown. released: year and month, "" if unknown.
        thinks: whether it writes its thoughts before each answer. made_for: such as "code"; "" for everything.
        expert_bits, dense_bits: of a published weight of its experts, and of attention and other matrices. unused:
            published weights that no pack has: of what a model sees with, and of layers that predict several tokens;
            kept: how many of these, and in the copy `fp8` of other weights that are not experts, have 16 bits where
            experts have fewer. rounding: what its weights were rounded to by those who converted them, such as
            "Q4_K_M"; "" where they are as published. code_bits: of its codes, where packs of as many keep them, else 0.
            coarse: whether that took so much that another file should be used. fp8: the repository of its maker's copy
            in FP8, "" where none is known.
        assistant: the repository of the model that guesses its tokens (`families.family.Assistant`), "" for none.
        gguf: a repository with its GGUF files, "" where none is known. file_bytes: of a GGUF file that is downloaded
            instead of the published weights; 0: these are. others: what other GGUF files are there, and their bytes.
        ready: a pack of it that needs no packing; of an entry without `repo` and `folder`, the only way to set it up.
    """

    name: str
    sizes: Sizes
    repo: str | None = None
    folder: Path | None = None
    packed: bool = False
    licence: str = ""
    gated: bool | None = None
    chat: str | None = ""
    released: str = ""
    thinks: bool = False
    made_for: str = ""
    expert_bits: float = 16.0
    dense_bits: float = 16.0
    unused: int = 0
    kept: int = 0
    rounding: str = ""
    code_bits: int = 0
    coarse: bool = False
    fp8: str = ""
    assistant: str = ""
    gguf: str = ""
    file_bytes: int = 0
    others: tuple[tuple[str, int], ...] = ()
    ready: ReadyPack | None = None

    def rounded_twice(self, bits: str) -> str:
        """What a person should know who packs it at these widths, in a line; "" where there is nothing to say."""
        if not self.rounding:
            return ""
        up, rows, dense = bits.split("/")
        parts = {"up": up, "gate": rows.partition("+")[0], "attention": dense}
        kept = [part for part, width in parts.items() if width == str(self.code_bits)]
        again = "" if {up, rows, dense} == {"16"} else f"; packed again at {bits} they are rounded twice"
        if kept:
            *others, last = kept
            named = f"{', '.join(others)} and {last} keep their codes" if others else f"{last} keeps its codes"
            again = f"; packed at {bits}, {named} and the rest is rounded twice"
        more = " Q8_0 or F16 keeps more." if self.coarse else ""
        return f"Its weights are {self.rounding}{again}.{more}"

    @property
    def smaller(self) -> str:
        """Of a model that is downloaded, how long its maker's rounded copy is; "" where there is none."""
        if not self.fp8 or self.folder is not None or self.file_bytes:
            return ""
        copy = replace(self, expert_bits=8.0, dense_bits=8.0)
        there = size(copy.checkpoint_bytes)
        return f"Its maker's FP8 copy is about {there} to download; set it up by its name, {self.fp8}."

    def as_gguf(self, label: str) -> CatalogEntry | None:
        """The same model from its GGUF file of a rounding in `GGUF_BITS`, its size estimated; None: none is known."""
        if not self.gguf or self.folder is not None or self.file_bytes:
            return None
        nbytes = round(GGUF_BITS[label] / 8 * self.sizes.parameters)
        return replace(
            self.headless,
            repo=f"{self.gguf}:{label}",
            rounding=label,
            file_bytes=nbytes,
            gated=False,
            fp8="",
            ready=None,
        )

    @property
    def headless(self) -> CatalogEntry:
        """The same model without its drafting head."""
        return replace(self, sizes=replace(self.sizes, draft=""))

    @property
    def as_pack(self) -> CatalogEntry | None:
        """The same model as its ready pack alone."""
        return None if self.ready is None else replace(self, repo=None, folder=None, gated=False)

    @property
    def only_pack(self) -> ReadyPack | None:
        """The ready pack, if there is no checkpoint to pack here."""
        return self.ready if self.repo is None and self.folder is None else None

    @property
    def download_bytes(self) -> int:
        """What setting it up downloads."""
        return self.only_pack.bytes if self.only_pack else 0 if self.folder else self.checkpoint_bytes

    @property
    def most_unread(self) -> int:
        """Bytes of its files that are on the disk at once while it is packed: of two shards, or about two layers."""
        one = max(self.file_bytes // self.sizes.decoder_layers, STRETCH) if self.file_bytes else SHARD_BYTES
        return min(2 * one, self.checkpoint_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        """The size of the published weights, computed from the architecture; embedding and head have 16 bits each, and
        tables at least 8.
        """
        if self.file_bytes:
            return self.file_bytes
        whole, rounded = 2 * (self.sizes.parameters + self.unused), self.sizes.in_experts + self.unused - self.kept
        less = (2 - self.expert_bits / 8) * rounded + (2 - max(8, self.expert_bits) / 8) * self.sizes.in_tables
        return whole - round(less + (2 - self.dense_bits / 8) * self.sizes.in_beside)
