"""Everything that crosses the engine thread's border: commands in, events out.

All are small frozen dataclasses of plain values, which msgspec can write and read. The engine never waits for a reader
of its events.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.rule import LATE as LATE
from ..kernels.rule import Rule as Rule
from .context import CONTEXT


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. With `temperature` 0 (greedy) the other values do not matter.

    `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 switch that filter off. `seed` None draws a fresh one.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Extras:
    """What few answers need. Their tokens are drawn one at a time.

    Attributes:
        presence_penalty, frequency_penalty: taken from a token's logit if the answer has it, and for each time.
        bias: numbers added to tokens' logits. likeliest: report each token's probability, and those of so many tokens.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    likeliest: int | None = None


@dataclass(frozen=True, slots=True)
class Chance:
    """A drawn token's probability before anything changed it, as a natural logarithm, and the likeliest tokens'."""

    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Advanced:
    """How the engine works; all but `kv_bits` and `draft` matter only if a device's memory is short.

    Attributes:
        predictor: what names the next layer's rows, one of `ranges.PREDICTORS`. cpu_share: whether the CPU computes a
            share of the rows that are not in device memory. transfer: how rows are copied, of `ranges.TRANSFERS`.
        kv_bits: of stored keys and values, of `ranges.KV_BITS`. context: tokens whose keys and values have device
            memory reserved. placement: where experts are, see `ranges.Wanted`. draft: whether tokens are guessed, to be
            computed together; or the model that guesses them, as `catalog.find` takes it.
    """

    predictor: str = "auto"
    cpu_share: bool = True
    transfer: str = "auto"
    kv_bits: str = "auto"
    context: int = CONTEXT
    placement: str = "auto"
    draft: bool | str = True

    def changed(self, *, offloaded: bool = True, pooled: bool = True, drafting: bool = True) -> tuple[str, ...]:
        """The values that differ from the default, in words, and which of them have no effect.

        Args:
            offloaded: a part of the experts is not on the device. pooled: rows of them share a pool there. drafting:
                another model guesses tokens.
        """
        moved = (
            ("" if self.predictor == "auto" else f"predictor {self.predictor}"),
            ("" if self.cpu_share else "no CPU share"),
            ("" if self.transfer == "auto" else f"transfer {self.transfer}"),
        )
        words = (
            ("" if self.placement == "auto" else f"placement {self.placement}", offloaded),
            (moved[0], pooled),
            *((word, offloaded) for word in moved[1:]),
            ("" if self.kv_bits == "auto" else f"{self.kv_bits}-bit context", True),
            (f"drafts by {self.draft}", drafting) if isinstance(self.draft, str) else ("", True),
            ("" if self.draft else "no drafts", True),
            ("" if self.context == CONTEXT else f"{self.context:,} tokens of context reserved", offloaded),
        )
        return tuple(f"{word}{'' if counts else ' (no effect here)'}" for word, counts in words if word)


@dataclass(frozen=True, slots=True)
class SpreadBy:
    """How several processes divide a model's experts.

    Attributes:
        pattern: see `parallel.holding.Grid.of`; "": the one that suits the model. balanced: whether processes with less
            to do leave out less (DualSparse-MoE section 4.3).
    """

    pattern: str = ""
    balanced: bool = False


# Commands -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Open the packed model in folder `pack` on `device` ("auto", "cpu", "cuda", "cuda:1", or a test device).

    `vram` is the most of the device's memory to use, in bytes; None: what is free. `parked` is the most RAM for keys
    and values of conversations that may come back; None: a share of what is free. `spread`: how several processes
    divide the experts. `states` is the most disk space for those of saved chats, for the next start; 0 keeps none.
    """

    pack: str
    preset: str | None = None
    device: str = "auto"
    vram: int | None = None
    advanced: Advanced = Advanced()
    parked: int | None = None
    spread: SpreadBy = SpreadBy()
    states: int = 0


MOST_TOGETHER = 4
"""How many answers are computed at once at most."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Continue `prompt` (token ids) by at most `max_new_tokens`, until one of `stop_ids` is drawn.

    `conversation` is the same number for all answers of a chat: what is said once per chat is not repeated. What is
    kept of it for the next start is found by it; 0: nothing is kept. `alike`: whether an answer with a seed comes again
    to the last bit, for which less of its prompt can be reused.
    """

    request: int
    prompt: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    conversation: int = 0
    extras: Extras = Extras()
    alike: bool = True


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop answering `request`; takes effect within one layer. A queued request is cancelled too."""

    request: int


@dataclass(frozen=True, slots=True)
class SetPreset:
    """Change the quality preset; takes effect with the next token, also in the middle of an answer."""

    preset: str


@dataclass(frozen=True, slots=True)
class SetQuality:
    """Set the quality by hand, from the next token on. The model decides whether thresholds are weighed."""

    rule: Rule


@dataclass(frozen=True, slots=True)
class Unload:
    """Unload the model and free its memory."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the engine thread."""


Command = Load | Generate | Cancel | SetPreset | SetQuality | Unload | Shutdown


# Events -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loading:
    """One step of loading began; `fraction` of the whole is done, in 0..1."""

    step: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model answers from now on.

    Attributes:
        model: the pack's name; folder: its folder. source: where its weights came from.
        context_window: tokens that prompt and answer may take together. vocabulary: the model's number of tokens.
        presets: the presets this pack can run, best first. preset: the one in force.
        widths: the pack's bit widths in words, such as "up 2, gate and down 4, attention 8 bits".
        device: where it computes. backend: which kernels run there. reason: why these.
        seconds: how long loading took. memory_bytes: device memory of the dense part and up projections.
        advanced: in words, which advanced settings in force differ from the default.
        remedy: in a sentence, how to make torch compute on a GPU that is there; "" if there is nothing to mend.
        placed: where experts are, in words. pools: the fewest and the most bytes that a pool of rows may have; None
            where no card shares the experts, or where several do. drafter: the other model that guesses tokens, or "".
        remote: the host of the server that answers, "" if this process does. A server has no presets and no widths,
            and may not say how large its `context_window` is (0).
    """

    model: str
    folder: str
    source: str
    context_window: int
    vocabulary: int
    presets: tuple[str, ...]
    preset: str
    widths: str
    device: str
    backend: str
    reason: str
    seconds: float
    memory_bytes: int
    advanced: tuple[str, ...] = ()
    remedy: str = ""
    remote: str = ""
    placed: str = ""
    pools: tuple[int, int] | None = None
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`done` of `total` prompt tokens are in the KV cache."""

    request: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Newly drawn token ids of an answer, in order, without the stop token. `chances`: of each, if asked for."""

    request: int
    ids: tuple[int, ...]
    chances: tuple[Chance, ...] = ()


@dataclass(frozen=True, slots=True)
class CardRows:
    """One of several cards.

    Attributes:
        moved, busy: bytes that its link moved in decode, and its busy seconds. pool, pool_used, up, dense, whole: bytes
            of its memory, see `Rows`. moved_per_token: None before anything was counted.
    """

    name: str
    moved: int
    busy: float
    pool: int
    pool_used: int
    up: int
    dense: int
    whole: int
    moved_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer's, see `Rows`. resident: share of its rows that are in the pool; None if it does not share the pool."""

    resident: float | None
    ready: float | None
    coming: float | None
    copied: float | None
    on_cpu: float | None


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of active neurons came from in an answer's decode, where device memory holds a part of them only.

    Shares are 0..1; None before anything was counted.

    Attributes:
        ready, coming, copied, on_cpu: shares of active neurons whose rows were in the pool, on their way there, fetched
            when needed, and computed by the CPU in RAM. left_out: absent rows that a lenient preset skipped.
            in_place: in layers that are all on the device. The six add up to 1.
        hits: as `ready`, of the pool's layers alone. layers: of each layer.
        expert_hits: share of expert calls of the pool's layers of which at least half the rows were there or on
            their way.
        recall, precision: of the neurons that were predicted one layer ahead; recalls, precisions: by layer.
        expert_recall, expert_precision: of the experts that were predicted one layer ahead, likewise; expert_recalls,
            expert_precisions: by layer. A correctly predicted neuron belongs to a correctly predicted expert.
        substituted: share of experts replaced by resident ones. dropped: of expert halves, by score.
        moved_per_token: bytes over the link. waited_per_token: seconds for rows on their way.
        link_bytes_s: the link's speed while it was busy. link_peak: its maximum, in bytes per second.
        link_busy: share of the time since the prompt in which it was. link_hidden: share of that in which it moved what
            was needed and the device did not wait.
        pool, pool_used, up, dense: bytes of device memory for rows, those in use, up projections, all else. whole: for
            rows of layers that are all there.
        evicted: rows of the pool that gave way to others since the answer was asked for, in its prompt too.
        virtual: whether times are those of a simulated device.
        cards: of each of several cards; the other figures are of all of them.
    """

    ready: float | None
    coming: float | None
    copied: float | None
    on_cpu: float | None
    expert_hits: float | None
    recall: float | None
    precision: float | None
    recalls: tuple[float | None, ...]
    precisions: tuple[float | None, ...]
    substituted: float | None
    dropped: float | None
    moved_per_token: float | None
    waited_per_token: float | None
    link_bytes_s: float | None
    link_peak: float
    link_busy: float | None
    pool: int
    pool_used: int
    up: int
    dense: int
    virtual: bool
    expert_recall: float | None = None
    expert_precision: float | None = None
    expert_recalls: tuple[float | None, ...] = ()
    expert_precisions: tuple[float | None, ...] = ()
    left_out: float | None = None
    whole: int = 0
    link_hidden: float | None = None
    cards: tuple[CardRows, ...] = ()
    in_place: float | None = None
    hits: float | None = None
    evicted: int = 0
    layers: tuple[LayerRows, ...] = ()

    @property
    def static(self) -> bool:
        """Whether no layer shares a pool: each is all on the device, or all in RAM."""
        return bool(self.layers) and all(layer.resident is None for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of the running answer or of the last one.

    What was not measured is None: a screen says so and never shows a zero instead. Of a server's answer only times and
    the server's own counts are known.

    Attributes:
        prompt_tokens, new_tokens: so far in this answer. `new_tokens` are the pieces that came if a server counts none.
        decode_tps: decode tokens/s over the last second; decode_tps_mean: over the whole answer.
        prefill_tps: prompt tokens/s. first_token_s: from the request to the first token.
        active_neurons: share of the selected experts' neurons that were active in decode, 0..1.
        bytes_per_token: weight bytes that decode's experts touched per token: up, and rows of active neurons.
        layer_activity: `active_neurons` layer by layer.
        expert_use: share of decode's expert calls that went to each expert, (L, E) row-major in one tuple per layer.
        ram_bytes: resident memory of this process. vram_bytes: device memory in use; None without a GPU.
        vram_budget: the most of the device's memory that may be used; None where the CPU computes in RAM.
        kv_bytes: bytes in the KV cache.
        context_used, context_window: tokens; a window of 0 is not known.
        reused_tokens: of the prompt, those whose keys and values were kept.
        rows: None if all rows are in the memory of the device that computes them.
        together: how many answers were computed together with its last token, this one among them.
        drafted, accepted: tokens that were guessed and computed, and how many of them were drawn. draft_speedup: the
            seconds that the answer's tokens would have taken one by one, as measured while none were guessed, over
            what they took.
    """

    request: int
    prompt_tokens: int | None
    new_tokens: int
    decode_tps: float | None
    decode_tps_mean: float | None
    prefill_tps: float | None
    first_token_s: float | None
    active_neurons: float | None
    bytes_per_token: float | None
    layer_activity: tuple[float, ...]
    expert_use: tuple[tuple[float, ...], ...]
    ram_bytes: int
    vram_bytes: int | None
    kv_bytes: int | None
    context_used: int | None
    context_window: int
    reused_tokens: int = 0
    rows: Rows | None = None
    vram_budget: int | None = None
    together: int = 1
    drafted: int = 0
    accepted: int = 0
    draft_speedup: float | None = None


@dataclass(frozen=True, slots=True)
class PresetChanged:
    """`preset` is in force from the next token on; "Custom" if the quality was set by hand."""

    preset: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that the user should know; the engine has dealt with it and continues."""

    title: str
    cause: str


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer ended. `reason`: "stop" (end of turn), "length", "context" (window full) or "cancelled"."""

    request: int
    reason: str
    stats: Stats


@dataclass(frozen=True, slots=True)
class Unloaded:
    """No model is loaded any more."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Something failed; `request` is None if it was not an answer. The engine itself continues."""

    title: str
    cause: str
    hint: str
    request: int | None = None
    exit_code: int = 1


Event = Loading | Loaded | PrefillProgress | NewTokens | Stats | PresetChanged | Notice | Finished | Unloaded | Failed
