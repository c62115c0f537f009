"""The gain of each part of the engine: parts are added in turn, each compared with the step before and with the first.

Every row is a real run of one model: transformers' own in 16 bit, then the same sizes with packed experts, and so on.
A figure is the time of one layer (engine/bench/layers.py). transformers' own model takes 4 GB of memory for each layer
of a Mixtral and 4 GB more; --quick leaves it out.

Run: .venv/bin/python tests/bench/ablation.py [PACK | --synthetic mixtral-8x7b --layers 2] [--quick] [--runs 5]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from floe_chat.engine import quality_presets
from floe_chat.engine.bench import synthetic
from floe_chat.engine.bench.layers import Found, RoundKey, answered, floor_figures, floor_parts, slope, told_apart
from floe_chat.engine.bench.measure import MeasureReport, ResultTable, Section, Timed, in_turn, summarise
from floe_chat.engine.bench.speed import WARM
from floe_chat.engine.bench.subject import Subject, from_pack
from floe_chat.engine.bench.synthetic import Spec
from floe_chat.engine.experts.moe_layer import Control
from floe_chat.engine.machine.conditions import backend, computing, facts
from floe_chat.engine.machine.load import Others
from floe_chat.engine.machine.read_floor import READ
from floe_chat.engine.quality.references import NO_SPARSITY
from floe_chat.engine.quality_presets import X_BITS_EXACT, Preset
from floe_chat.engine.telemetry import Telemetry
from floe_chat.kernels.rule import Rule
from floe_chat.models.pack.manifest import DENSE_WIDTHS
from torch import Tensor

PROMPT = 4  # tokens: few, since decoding is timed
_FLOAT16 = 2  # bytes
_PLAIN = "transformers' own, 16 bit"
_EXACT = Preset("Exact", x_bits=X_BITS_EXACT)


@dataclass(frozen=True, slots=True)
class Variant:
    """One more part of the engine: the model it runs on, and what is skipped."""

    name: str
    subject: Subject
    preset: Preset = NO_SPARSITY


def of_spec(spec: Spec, report: Callable[[str], None], *, quick: bool) -> list[Variant]:
    """The steps of a synthetic model, whose dense part can have any width; `quick` leaves out transformers' own.

    Raises:
        FloeError: too little memory for all models at once; they share their experts.
    """
    widths = sorted(DENSE_WIDTHS, reverse=True)
    specs = {bits: replace(spec, dense=bits) for bits in widths}
    experts = synthetic.nbytes(spec) - synthetic.dense_bytes(spec)
    wanted = experts + sum(synthetic.dense_bytes(one) for one in specs.values())
    wanted += 0 if quick else _plain_bytes(spec.config())
    synthetic.need_memory(wanted, "All steps together", "Add --quick, which leaves out the largest.")
    report("Making weights")
    layers = synthetic.expert_layers(spec)
    subjects = {bits: synthetic.build(one, layers, "cpu") for bits, one in specs.items()}
    report("Measuring thresholds")
    synthetic.calibrate(subjects[spec.dense])
    first, *others = widths
    steps = [] if quick else _first(subjects[first], report)
    steps.append(Variant("packed experts, dense 16 bit, exact", subjects[first], _EXACT))
    steps.append(Variant("x read with 15 bits", subjects[first]))
    steps += [Variant(f"dense {bits} bit", subjects[bits]) for bits in others if bits >= spec.dense]
    steps += _skipping(subjects[spec.dense])
    return steps + [
        Variant(f"dense {bits} bit", subjects[bits], steps[-1].preset) for bits in others if bits < spec.dense
    ]


def of_pack(subject: Subject, report: Callable[[str], None], *, quick: bool) -> list[Variant]:
    """The steps of a pack, with its own dense width; `quick` leaves out transformers' own.

    Raises:
        FloeError: too little memory for its 16-bit twin.
    """
    if not quick:
        hint = "Add --quick, which leaves it out."
        synthetic.need_memory(_plain_bytes(subject.model.config), "This model's weights in 16 bit", hint)
    exact = Variant(f"packed experts, dense {subject.manifest.widths.dense} bit, exact", subject, _EXACT)
    steps = [] if quick else _first(subject, report)
    return [*steps, exact, Variant("x read with 15 bits", subject), *_skipping(subject)]


def _first(subject: Subject, report: Callable[[str], None]) -> list[Variant]:
    report("Making 16-bit weights")
    return [Variant(_PLAIN, plain(subject))]


def _skipping(subject: Subject) -> list[Variant]:
    """The default preset's ways of skipping, one by one; those that it does not use are left out."""
    preset = quality_presets.get(quality_presets.DEFAULT, subject.manifest)
    rule = preset.rule
    steps = [Variant(f"{rule.sparsity * 100:.0f} % of neurons skipped", subject, Preset("", Rule(rule.sparsity)))]
    if rule.product:
        name = f"{rule.product * 100:.0f} % of down halves skipped"
        steps.append(Variant(name, subject, Preset("", Rule(rule.sparsity, rule.product))))
    if rule.drops:
        steps.append(Variant("experts of low score skipped", subject, preset))
    return steps


def plain(subject: Subject) -> Subject:
    """transformers' own model of the same sizes in bfloat16, its experts one by one, weights random."""
    from transformers import AutoModelForCausalLM

    config: Any = subject.model.config
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="eager")
    rotary = model.model.rotary_emb
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = type(rotary)(config=config)
    for parameter in model.parameters():
        _fill(parameter.data)
    a = subject.manifest.architecture
    name = f"{subject.name} by transformers"
    control, telemetry = Control(NO_SPARSITY), Telemetry(a.layers, a.experts)
    return replace(subject, name=name, model=model, control=control, telemetry=telemetry)


def _fill(tensor: Tensor) -> None:
    """Ones for a norm, else normal values that repeat: drawing billions of them would take minutes."""
    if tensor.ndim == 1:
        tensor.fill_(1)
        return
    drawn = torch.empty(min(tensor.numel(), 1 << 20)).normal_(0, 0.02).to(tensor.dtype)
    for part in tensor.view(-1).split(drawn.numel()):
        part.copy_(drawn[: part.numel()])


def _plain_bytes(config: Any) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    return _FLOAT16 * sum(parameter.numel() for parameter in model.parameters())


def run(steps: list[Variant], *, threads: int | None, runs: int, report: MeasureReport) -> ResultTable:
    """Measure.

    Raises:
        UsageError: more threads than cores.
    """
    subject = steps[-1].subject
    a, chosen, title = subject.manifest.architecture, backend("cpu"), f"ablation of {subject.name}"
    with computing(threads, a.hidden, a.intermediate) as threads:
        parts, others = floor_parts("cpu"), Others()
        parts += [lambda step=step: _timed(step) for step in steps]
        found = in_turn(parts, warm=WARM, runs=runs, report=lambda done, total: report(title, done, total))
        cores = others.cores()
    rows, notes = _rows(steps, found)
    told = {"model": subject.describe(), **facts(chosen, threads=threads, runs=runs, warm_up=WARM)}
    section = Section("One token, one layer by the difference of layer counts", summarise(rows), cores)
    return ResultTable("ablation", "cpu", told, (section,), notes)


def _timed(step: Variant) -> dict[RoundKey, float]:
    step.subject.control.preset = step.preset
    return answered(step.name, step.subject, step.subject.prompt(PROMPT), prefill=False)


def _rows(steps: list[Variant], found: Found) -> tuple[list[Timed], tuple[str, ...]]:
    """A figure per step, compared with the step before and, in its note, with the first."""
    counts = {step.name: (step.subject.fewest, step.subject.layers) for step in steps}
    clear, notes = told_apart(found, counts)
    rows = floor_figures(found)
    floor = READ if rows else None
    for before, name in zip([None, *clear], clear, strict=False):
        seconds, read = (slope(found, name, counts[name], what) for what in ("seconds", "read"))
        first = slope(found, clear[0], counts[clear[0]], "seconds")
        note = f"{median(a / b for a, b in zip(first, seconds, strict=True)):.2f}x in all" if before else ""
        rows.append(Timed(name, seconds, read, floor, before, note=note))
    return rows, notes


def main() -> None:
    from floe_chat.app.cli.bench.table import finish
    from floe_chat.models.catalog import DEMO, asset, find

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=DEMO)
    parser.add_argument("--synthetic", choices=synthetic.MODELS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()

    def show(step: str, _done: int = 0, _total: int = 1) -> None:
        print(step, file=sys.stderr)

    if options.synthetic:
        steps = of_spec(Spec(options.synthetic, options.layers), show, quick=options.quick)
    else:
        text = asset("calibration.txt").read_text(encoding="utf-8")
        steps = of_pack(from_pack(find(options.model), "cpu", text), show, quick=options.quick)
    finish(run(steps, threads=options.threads, runs=options.runs, report=show), as_json=False)


if __name__ == "__main__":
    main()
