"""The sentences of a plan: why these bits, why there, what RAM is for, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...models.catalog import CatalogEntry
from ...models.catalog_entry import OFFERED
from ...models.packing.pack import PackSpec
from ...models.quantities import digits, memory, share, size, trimmed
from ..machine import hardware
from ..offload.mix import Mix
from ..offload.table_rows import cached
from .footprint import Footprint, divisible
from .machine import Machine
from .measured_figures import figures
from .memory_plan import Needs, budget
from .options import DEFAULT, Option, option
from .speed_estimate import table_reads
from .worth import ENOUGH, NEWER, READING, WORTH, shorter_pays

# The meanings of bits and KL, in the words that every page uses.
BITS = (
    "Bits: bits per weight, written up / gate and down / attention. Fewer are smaller and faster, and less exact; "
    "published models have 16."
)
KL = (
    "Quality loss (KL): how far the next-word probabilities move from the 16-bit original's, in nats. 0 is identical, "
    "below 0.01 is hard to notice, above 0.1 is noticeable. Measured on the 22-million-parameter demo model, so only "
    "a guide."
)
RANKING = (
    f"Reading speed is {READING:.0f} tokens/s or more, {ENOUGH:.0f} for models that think before they answer, twice as "
    "much where the disk is read meanwhile. How well models answer is not measured here. They are ordered by a rule of "
    "thumb: the geometric mean of all parameters and of those that a token uses, which counts twice for every "
    f"{12 * NEWER:.0f} months that a model is newer, and half for every {WORTH} nats of quality loss. "
    "Models that run in part in transformers' modules come after the others."
)
MEMORY = (
    "Memory: dense is attention, router, embedding and output layer; up is the up projections; rows are the gate and "
    "down weights, and pool the rows that the GPU holds of layers that are not all there; context is the chat's keys "
    "and values; table rows are those used last of tables on the disk; pages is the part of the pack that is cached in "
    "RAM, and lacking the part that is read from the disk."
)
_PARTS = {
    "dense": "attention and the output layer",
    "up": "finding active neurons",
    "rows": "computing active neurons",
    "disk": "reading from the disk",
    "host": "floe-chat's own Python code",
}


def describe(spec: PackSpec) -> str:
    """Widths as every page shows them: "3/4/4" for up / gate and down / attention."""
    rows = f"{spec.gate}" if spec.gate == spec.down else f"{spec.gate}+{spec.down}"
    return f"{spec.up}/{rows}/{spec.dense}"


def rounded_before(entry: CatalogEntry, bits: str) -> str:
    """What a person should know who packs weights that were rounded already at these widths; "" for others."""
    if not entry.rounding:
        return ""
    if (loss := figures().gguf_kl.get(entry.rounding)) is not None:
        said = f"On the demo model that adds {trimmed(loss, 2)} to the quality loss, which is counted in."
    elif entry.rounding in figures().rounded_kl:
        said = costs(entry.rounding)
    else:
        said = "How much that adds to the quality loss was not measured."
    return f"{entry.rounded_twice(bits)} {said}"


def smaller(entry: CatalogEntry) -> str:
    """The maker's copy that is shorter to download, and what it costs; "" where there is none."""
    return f"{entry.smaller} {costs('FP8')}" if entry.smaller else ""


def shorter_file(entry: CatalogEntry) -> str:
    """The GGUF file that is shorter to download, and what it costs; "" where none is known."""
    if (copy := from_gguf(entry)) is None:
        return ""
    there = f"{copy.rounding} from {entry.gguf} is about {size(copy.file_bytes)} to download"
    return f"{there}: floe-chat setup {copy.repo}. {costs(copy.rounding)}"


def from_gguf(entry: CatalogEntry) -> CatalogEntry | None:
    """The same model from a GGUF file of the rounding that is offered; None where none is known."""
    return entry.as_gguf(OFFERED)


def prefers(entry: CatalogEntry, copy: CatalogEntry) -> bool:
    """Whether the shorter download of a rounded copy is worth what it loses."""
    return shorter_pays(entry.download_bytes / copy.download_bytes, figures().gguf_kl[copy.rounding])


def costs(rounding: str) -> str:
    """What a rounding that was measured adds, in a sentence."""
    known = figures()
    loss = known.gguf_kl[rounding] if rounding in known.gguf_kl else known.rounded_kl[rounding]
    return f"On the demo model, {rounding} adds about {trimmed(loss, 2)} to the quality loss (KL)."


def rule() -> str:
    """How the recommendation weighs speed and loss (see options.py)."""
    return (
        f"The recommendation weighs speed against quality loss: twice the speed is worth {WORTH} nats, and a third of "
        f"that above {ENOUGH:.0f} tokens/s, which is faster than most people read. {describe(DEFAULT)} is recommended "
        "unless another choice is clearly better."
    )


def lacks(missing: Mapping[str, int]) -> str:
    """What is missing: "3.2 GB of RAM and 12.1 GB of disk space"."""
    return " and ".join(
        f"{memory(count)} of RAM" if what == "ram" else f"{size(count)} of disk space"
        for what, count in missing.items()
    )


def why_not(nearest: Option, missing: Mapping[str, int]) -> str:
    """Why nothing works, for the option that is nearest to working."""
    bits = f"{describe(nearest.spec)} bits"
    if nearest.missing:
        return f"Even with {bits}, {lacks(missing)} {'is' if len(missing) == 1 else 'are'} missing."
    slow = f"Even with {bits} it would answer at {digits(nearest.decode.mid, 2)} tokens/s"
    if not nearest.ram["lacking"]:
        return f"{slow}."
    return (
        f"{slow}, because {share(1 - nearest.ram_share)} of what a token reads would come from the disk. "
        f"With {lacks(missing)} more it would all be in RAM."
    )


def why(
    machine: Machine, entry: CatalogEntry, chosen: Option, options: Sequence[Option], context: int
) -> tuple[str, ...]:
    """The reasons for the choice."""
    return tuple(
        sentence
        for sentence in (
            *_why_bits(entry, chosen, options),
            _why_place(machine, entry, chosen, context),
            _why_cards(machine, entry, chosen, context),
            _why_compiled(chosen),
            _why_slow(entry),
            _why_tables(machine, entry, chosen),
            _why_ram(machine, chosen),
            _why_speed(chosen),
        )
        if sentence
    )


def _why_bits(entry: CatalogEntry, chosen: Option, options: Sequence[Option]) -> list[str]:
    if entry.packed:
        return [f"It is already packed, with {describe(chosen.spec)} bits."]
    if entry.only_pack:
        return [f"It is a ready pack, with {describe(chosen.spec)} bits: nothing has to be packed."]
    said = [f"{describe(chosen.spec)} bits: quality loss {_loss(chosen)} at about {_speed(chosen)}."]
    at = options.index(chosen)
    if better := next((one for one in reversed(options[:at]) if not one.missing), None):
        more = f"More exact: {describe(better.spec)} bits, quality loss {_loss(better)}, at about {_speed(better)}"
        said.append(f"{more}{_because(better, chosen)}.")
    elif at:
        said.append(f"{describe(options[at - 1].spec)} bits would need {lacks(options[at - 1].missing)} more.")
    after = (one for one in options[at + 1 :] if one.works and one.decode.mid > chosen.decode.mid)
    faster = [one for one in after if _speed(one) != _speed(chosen)]
    if faster:
        said.append(
            f"Faster: {describe(faster[0].spec)} bits, about {_speed(faster[0])}, but quality loss {_loss(faster[0])}."
        )
    return [*said, rule()] if len(said) > 1 else said


def _because(slower: Option, chosen: Option) -> str:
    """Why a more exact option is so much slower."""
    if slower.ram_share < chosen.ram_share:
        return f", because {share(1 - slower.ram_share)} of what a token reads would come from the disk"
    if slower.place != chosen.place and chosen.place == "gpu":
        return ", because not all of it would fit on the GPU"
    if slower.place == "cpu" != chosen.place:
        return ", because the GPU could not help"
    return ""


def _loss(option: Option) -> str:
    return f"KL {trimmed(option.kl, 2)}"


def _speed(option: Option) -> str:
    return f"{digits(option.decode.mid, 2)} tokens/s"


def _why_place(machine: Machine, entry: CatalogEntry, chosen: Option, context: int) -> str:
    if chosen.cards:
        return ""
    usable = budget(machine.vram)
    asked = Needs.of_footprint(Footprint.of(entry.sizes, chosen.spec), chosen.context, chosen.kv_bits)
    free = f"{memory(machine.vram - usable)} of its {memory(machine.vram)} is left to torch and the desktop"
    room, short = f"{chosen.context:,} tokens of context", _short(chosen, context)
    if chosen.place == "gpu":
        beside = f" with {room}{short}" if short else ""
        return f"All of it fits on the GPU: it needs {memory(asked.whole())}{beside}, and {free}."
    if chosen.mix is not None:
        return (
            f"The GPU holds part of it: all of it would need {memory(asked.whole())}, and {free}. It has attention, "
            f"{room}{short}{_experts(chosen.mix, chosen)} About {share(chosen.token.hit)} of what a "
            "token needs is there."
        )
    if not machine.vram:
        return "The CPU computes: there is no GPU to use."
    least = asked.least(asked.every("cpu"))
    if least > usable:
        return f"The CPU computes: the GPU would need {memory(least)}, and {memory(usable)} can be used."
    return "The CPU computes (--device cpu): here that is faster than a GPU that holds so little of the model."


def _short(chosen: Option, context: int) -> str:
    """That there is less room than was asked for."""
    if chosen.context >= context:
        return ""
    return f" (of the {context:,} that were asked for: those of a longer chat are in RAM, which is slower)"


def _why_cards(machine: Machine, entry: CatalogEntry, chosen: Option, context: int) -> str:
    """What several cards are worth: the division, and the speed of the best of them alone."""
    if not machine.others:
        return ""
    alone = max(
        (option(one, entry, chosen.spec, context, kv_bits=chosen.kv_bits) for one in machine.each),
        key=lambda one: (not one.missing, one.decode.mid),
    )
    if not chosen.cards and not divisible(entry.sizes.model_type):
        return "One card is used: layers that keep a state cannot be divided."
    if not chosen.cards:
        return "The CPU computes: the cards together have no room for the model, or would be slower."
    counts = " and ".join(_layers(card.layers) for card in chosen.cards)
    said = f"The cards have {counts}, one after the other, as is fastest by our estimate with their memory and rates"
    if short := _short(chosen, context):
        said += f", and {chosen.context:,} tokens of context{short}"
    if alone.missing:
        return f"{said}. One of them alone would not do."
    times = chosen.decode.mid / alone.decode.mid
    against = f"{said}: about {digits(times, 2)} times as fast as one of them alone, {_speed(alone)}."
    if times < 1:
        return f"{against} One card alone is faster."
    return against


def _why_compiled(chosen: Option) -> str:
    """That this computer cannot do it yet."""
    if chosen.place != "pool" or not (why := hardware.uncompiled()):
        return ""
    return f"Cards that hold a part of a model need compiled code, and {why}. {hardware.compiled_by()}"


def _why_slow(entry: CatalogEntry) -> str:
    """That floe-chat has code of its own for its experts alone."""
    if entry.sizes.counted is None or not entry.sizes.counted.library:
        return ""
    return (
        f"Its experts run in floe-chat's own code, and all else in transformers' modules, because "
        f"{entry.sizes.counted.library}: that takes about {1e3 * figures().host_library_s:.1f} ms more for each layer "
        "and token."
    )


def _why_tables(machine: Machine, entry: CatalogEntry, chosen: Option) -> str:
    """What embeddings on the disk take and cost."""
    takes = Footprint.of(entry.sizes, chosen.spec)
    if not takes.tables:
        return ""
    rows, ms = sum(count for *_, count in entry.sizes.tables), 1e3 * table_reads(takes, machine.speeds)
    return (
        f"Its tables of n-grams stay on the disk, {size(takes.tables)} of the pack: a token reads {rows} rows of them, "
        f"in about {trimmed(ms, 2)} ms, and {memory(cached(takes.tables))} of RAM keep those used last."
    )


def _experts(mix: Mix, chosen: Option) -> str:
    """Ends the list of what a GPU has with the layers' experts, and says what becomes of the others."""
    said = f", all experts of {_layers(mix.gpu)}" if mix.gpu else ""
    if mix.pool:
        said += (
            f", and room for {share(chosen.pool_share)} of the neurons of {_layers(mix.pool)}: the CPU computes some "
        )
        said += "of the others, and copies some to it"
    return said + (f". The CPU computes the experts of {_layers(mix.cpu)}." if mix.cpu else ".")


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"


def _why_ram(machine: Machine, chosen: Option) -> str:
    free = f"{memory(chosen.ram['free'])} of {memory(machine.ram)} of usable RAM stay free"
    if chosen.ram_share >= 1:
        return f"Everything that a token reads fits in RAM; {free}."
    return f"{share(chosen.ram_share)} of what a token reads fits in RAM; the rest is read from the disk. {free}."


def _why_speed(chosen: Option) -> str:
    parts = {name: getattr(chosen.token, name) for name in _PARTS}
    most = max(parts, key=parts.__getitem__)
    return f"{share(parts[most] / chosen.token.seconds)} of the time goes to {_PARTS[most]}."
