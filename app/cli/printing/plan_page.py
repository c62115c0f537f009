"""The pages of `floe-chat plan`: one model's plan, all models compared, and the cards that `--card` knows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ....models.catalog_entry import AssistantSizes
from ....models.quantities import digits, estimate, forecast, memory, size, trimmed
from ...setup.ready_words import in_short
from .wrapping import columns, wrapped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ....engine.planning.options import OnCard, Option
    from ....engine.planning.plan import Plan

_NAME = 10
_MODEL = 31  # columns of a model's name
_HEADINGS = {
    "reading": "Answer at reading speed, best first",
    "slower": "Slower answers, fastest first",
    "base": "Base models, which continue text and cannot chat",
    "unfit": "Do not fit",
}
_PLACES = {"gpu": "GPU", "pool": "GPU and CPU", "cpu": "CPU"}


def text_of(plan: Plan) -> str:
    """The plan for people."""
    from ....engine.planning.reasons import BITS, KL, MEMORY, describe, rounded_before, shorter_file, smaller

    entry = plan.entry
    about = [entry.repo or str(entry.folder or ""), _weights(plan), entry.licence]
    lines = [wrapped(f"{entry.name}: {', '.join(part for part in about if part)}", others="    ")]
    if entry.gated:
        lines.append(_wrapped("Its publisher asks you to accept terms on the hub first; that needs an account."))
    if entry.chat is None:
        base = "It is a base model: it continues text, but has no chat template, so floe-chat cannot chat with it."
        lines.append(_wrapped(base))
    lines += ["", *_machine_lines(plan), ""]
    if plan.chosen is None:
        lines += ["It does not fit", *map(_wrapped, (*plan.why, plan.instead)), ""]
    else:
        twice = rounded_before(entry, describe(plan.chosen.spec))
        lines += [
            "Plan",
            *_lines(plan, plan.chosen),
            "",
            "Why",
            *map(_wrapped, filter(None, (*plan.why, twice, smaller(entry), shorter_file(entry)))),
            "",
        ]
        if entry.folder is None:
            ready = f" ({entry.ready.place}: {in_short(entry.ready)})" if entry.ready else ""
            lines += [_wrapped(f"Set it up: floe-chat setup {entry.name}{ready}").strip(), ""]
    if len(plan.options) > 1:
        lines += ["Choices, most exact first (* recommended)", *_table(plan), ""]
    note = "Speeds are estimates, with their ranges, for the preset Balanced."
    legend = (BITS, KL, note) if plan.chosen is None else (BITS, KL, MEMORY, note)
    return "\n".join([*lines, *(wrapped(text, others="    ") for text in legend)])


def text_of_all(plans: Sequence[Plan]) -> str:
    """All listed models on one machine, for people; `plans` as `ranked` orders them."""
    from ....engine.planning.plan import STANDINGS, recommended, standing
    from ....engine.planning.reasons import KL, RANKING

    beside = any(one.chosen and one.chosen.vram for one in plans)
    lines = [*_machine_lines(plans[0]), ""]
    for stands in STANDINGS:
        rows = [_row(one, beside=beside) for one in plans if standing(one.entry, one.chosen) == stands]
        if rows and stands != "unfit":
            gpu = f"{'GPU':>9}" if beside else ""
            heads = f"{'parameters':>12}{'tokens/s':>20}{'download':>9}{gpu}{'RAM':>9}{'KL':>8}"
            lines += [_HEADINGS[stands], _beside("", heads), *rows, ""]
        elif rows:
            lines += [_HEADINGS[stands], *rows, ""]
    first = recommended(plans)
    gated = [one.entry.name for one in plans if one.entry.gated]
    thinking = [one.entry.name for one in plans if one.entry.thinks]
    notes = [
        _recommendation(first) if first else "The built-in demo model always works: floe-chat",
        f"More about one: floe-chat plan {(first or plans[0]).entry.name}",
        f"Terms to accept on the hub first: {', '.join(gated)}." if gated else "",
        f"Think before they answer: {', '.join(thinking)}." if thinking else "",
        RANKING,
        "Parameters: all, and those that a token uses. GPU and RAM: memory in use. Downloads are computed, for "
        "the original weights; a GGUF file, which most have, is a third of that: the plan of a model names it.",
        f"{KL} It is not measured for the models listed.",
        "Speeds are estimates, with their ranges, for the preset Balanced.",
    ]
    return "\n".join([*lines, *(wrapped(note, others="    ") for note in notes if note)])


def _row(one: Plan, *, beside: bool) -> str:
    """One model's figures; `beside`: whether there is a column of GPU memory."""
    from ....engine.planning.reasons import lacks

    if (chosen := one.chosen) is None:
        return f"  {one.entry.name:<{_MODEL}}needs {lacks(one.missing)} more"
    sizes = one.entry.sizes
    count = f"{digits(sizes.parameters / 1e9)}, {digits(sizes.active / 1e9, 2)} B"
    gpu = f"{memory(_used(chosen.vram)) if chosen.vram else '':>9}" if beside else ""
    fetched = size(one.entry.checkpoint_bytes)
    figures = f"{count:>12}{_speed(chosen):>20}{fetched:>9}{gpu}{memory(_used(chosen.ram)):>9}"
    return _beside(one.entry.name, f"{figures}{trimmed(chosen.kl, 2):>8}")


def _beside(name: str, figures: str) -> str:
    """A model's name and its figures in one line, or in two where the terminal is too narrow."""
    one = f"  {name:<{_MODEL}}{figures}"
    return one if len(one) <= columns() else "\n".join(filter(None, [f"  {name}".rstrip(), f"    {figures}"]))


def _recommendation(one: Plan) -> str:
    """What to set up, and what that takes."""
    assert one.chosen is not None
    if one.entry.ready is not None:
        return f"Recommended: floe-chat setup {one.entry.name} ({in_short(one.entry.ready)})"
    packing = "" if one.pack_s is None else f", {forecast(one.pack_s)} of packing"
    takes = f"{size(one.chosen.disk['pack'])} on the disk{packing}"
    return f"Recommended: floe-chat setup {one.entry.name} ({takes})"


def _used(held: Mapping[str, int]) -> int:
    """Bytes of memory that are in use."""
    return sum(count for use, count in held.items() if use not in ("free", "lacking"))


def cards_text() -> str:
    """The graphics cards that `--card` knows, by series."""
    from ....engine.offload.cards import by_series

    lines: list[str] = []
    for series, cards in by_series().items():
        sizes: dict[str, list[str]] = {}
        for card in cards:
            sizes.setdefault(card.title, []).append(memory(card.vram_bytes).removesuffix(" GB"))
        named = [f"{title} {' or '.join(counts)} GB".replace(" ", "\0") for title, counts in sizes.items()]
        filled = wrapped(", ".join(named), "  ", "  ")
        lines += [series, filled.replace("\0", " "), ""]
    note = 'Write --card 3090 or --card "RTX 3080 12 GB". Others: --vram, --pcie and --link-gbs describe any card.'
    return "\n".join([*lines, note])


def _machine_lines(plan: Plan) -> list[str]:
    return [f"Machine: {plan.machine.called}", *map(_wrapped, plan.machine.told.values())]


def _weights(plan: Plan) -> str:
    count = plan.entry.sizes.parameters
    return f"{digits(count / 1e9)} B parameters" if count >= 1e9 else f"{digits(count / 1e6)} M parameters"


def _wrapped(sentence: str) -> str:
    return wrapped(sentence, "  ", "    ")


def _lines(plan: Plan, chosen: Option) -> list[str]:
    from ....engine.planning.reasons import describe

    def uses(held: dict[str, int]) -> str:
        return ", ".join(f"{use} {memory(count)}" for use, count in held.items() if count)

    fetched = size(plan.entry.checkpoint_bytes)
    download = f"{fetched}, computed from the architecture" if plan.entry.folder is None else ""
    if plan.download_s is not None:
        download = f"{fetched}, {forecast(plan.download_s)}"
    words = [
        ("bits", f"{describe(chosen.spec)} (up / gate and down / attention)"),
        ("loss", f"KL {trimmed(chosen.kl, 2)}{_measured(plan)}"),
        ("computes", _PLACES[chosen.place]),
        ("experts", _mix(chosen)),
        *((f"card {number}", _on_card(card)) for number, card in enumerate(chosen.cards, 1)),
        ("answer", f"{_speed(chosen)} tokens/s"),
        ("prompt", f"{estimate(*dataclasses.astuple(chosen.prefill))} tokens/s"),
        ("context", _context(plan, chosen)),
        ("GPU", uses(dict(chosen.vram))),
        ("RAM", uses(dict(chosen.ram))),
        ("disk", _disk(chosen, plan)),
        ("drafting", _drafting(plan, chosen)),
        ("download", download),
        ("packing", "" if plan.pack_s is None else f"{forecast(plan.pack_s)} on {plan.machine.cores} cores"),
    ]
    return [wrapped(f"  {name:<{_NAME}}{text}", others=" " * (_NAME + 2)) for name, text in words if text]


def _drafting(plan: Plan, chosen: Option) -> str:
    """What guesses further tokens, if anything does."""
    draft, listed = chosen.disk.get("draft"), plan.entry.assistant
    if not draft:
        return ""
    what = f"an assistant{f' ({listed})' if listed else ''}"
    return f"{what if isinstance(plan.entry.sizes.draft, AssistantSizes) else 'a head'} of {size(draft)} in the pack"


def _measured(plan: Plan) -> str:
    """On which model the quality loss of these bits was measured."""
    from ....models.catalog import DEMO

    return "" if plan.entry.name == DEMO else " on the demo model; not measured for this one"


def _context(plan: Plan, chosen: Option) -> str:
    """What is reserved, and how fast the end of a long chat would be."""
    window, (full, longest) = plan.entry.sizes.window, chosen.full
    coarse = f" with keys and values of {chosen.kv_bits} bits" if chosen.kv_bits < 16 else ""
    text = f"{plan.context:,} tokens{coarse}; about {digits(full, 2)} tokens/s behind so many"
    return text if window == plan.context else f"{text}, {digits(longest, 2)} behind {window:,}"


def _mix(chosen: Option) -> str:
    """Where the layers' experts are, and how fast it would be without a pool."""
    if chosen.mix is None or chosen.place != "pool" or chosen.static is None:
        return ""
    static = f"; without the pool {digits(chosen.static, 2)} tokens/s at best"
    return chosen.mix.describe() + (static if chosen.mix.pool else "")


def _on_card(card: OnCard) -> str:
    """Which layers one of several cards has, and where their experts are."""
    last = card.first + card.layers
    which = f"layer {last}" if card.layers == 1 else f"layers {card.first + 1} to {last}"
    experts = "" if card.mix is None else f": {card.mix.describe()}"
    return f"{card.name}, {which}{experts}; {memory(_used(card.vram))} in use, {memory(card.vram['free'])} free"


def _disk(chosen: Option, plan: Plan) -> str:
    if not chosen.disk["pack"]:
        return ""
    free = "" if plan.machine.disk_free is None else f"; {size(plan.machine.disk_free)} are free"
    return f"{size(chosen.disk['pack'])}, up to {size(chosen.disk['peak'])} while it is set up{free}"


def _table(plan: Plan) -> list[str]:
    from ....engine.planning.reasons import describe, lacks

    rows = [f"  {'bits':<12}{'KL':>8}  {'computes':<14}{'tokens/s':>22}{'on disk':>10}"]
    for one in plan.options:
        speed = f"needs {lacks(one.missing)} more" if one.missing else _speed(one)
        mark = "*" if one is plan.chosen else " "
        place = _PLACES[one.place] + ("" if one.ram_share >= 1 else ", disk")
        row = f"{mark} {describe(one.spec):<12}{trimmed(one.kl, 2):>8}  {place:<14}"
        rows.append(f"{row}{speed:>22}{size(one.disk['pack']):>10}" if not one.missing else f"{row}  {speed}")
    return rows


def _speed(one: Option) -> str:
    return estimate(*dataclasses.astuple(one.decode))
