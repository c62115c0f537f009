"""`floe-chat doctor`: the machine's hardware, each figure with its source, and which code would run on it and why."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from ...engine.events import Advanced
from ...engine.machine import hardware
from ...engine.machine.gpus import Gpu
from ...engine.machine.hardware import Hardware
from ...engine.offload.links import tuned_link
from ...engine.offload.links.tuned_link import Tuned
from ...engine.planning import machine, rates
from ...engine.planning.rates import Measured
from ...models import catalog, quantities
from ...models.errors import FloeError
from ...models.quantities import trimmed
from ..log import log_file
from ..settings.file import read, settings_file
from ..text.plain_text import printable
from .bench.table import measuring

_NAME, _VALUE = 14, 40


def report(*, as_json: bool, measure: bool = False) -> str:
    """The findings, as text for people or as one JSON object; with `measure`, rates are measured again first."""
    found = hardware.probe(catalog.models_folder())
    paths = hardware.compute_paths()
    try:
        models, trouble = catalog.installed(), ""
    except FloeError as error:  # the rest of the report may still help
        models, trouble = [], f"{error.title}: {error.cause}"
    measured = _measured() if measure else rates.Measured.load(rates.kept_file())
    links = tuple(tuned_link.all_kept())
    advanced = read(settings_file()).settings.advanced
    if not as_json:
        return _text(found, measured, paths, links, advanced, models, trouble)
    fields: dict[str, Any] = {
        "version": version("floe-chat"),
        "hardware": dataclasses.asdict(found),
        "measured": dataclasses.asdict(measured) if measured else None,
        "paths": [dataclasses.asdict(path) for path in paths],
        "links": [dataclasses.asdict(link) for link in links],
        "advanced": dataclasses.asdict(advanced),
        "models": [{**dataclasses.asdict(model), "folder": str(model.folder)} for model in models],
        "models_trouble": trouble or None,
        "log_file": str(log_file()),
    }
    return json.dumps(fields, indent=2)


def _measured() -> Measured:
    tuned_link.forget()
    with measuring() as progress:
        return rates.measure(catalog.models_folder(), lambda name: progress(f"Measuring {name}", 0, 1))


def _text(
    found: Hardware,
    measured: Measured | None,
    paths: tuple[hardware.ComputePath, ...],
    links: tuple[Tuned, ...],
    advanced: Advanced,
    models: list[catalog.Installed],
    trouble: str,
) -> str:
    return "\n".join(
        [
            f"floe-chat {version('floe-chat')}",
            "",
            "Machine",
            *_machine(found),
            "",
            "Measured rates (up, rows, dense and prompt: the kernels, by bits per weight)",
            *_rates(measured),
            "",
            "Paths",
            *(_line(path.device, path.backend or "not available", path.reason) for path in paths),
            *_links(found, links),
            "",
            "Advanced settings, for models larger than the GPU's memory",
            *_advanced(advanced),
            "",
            "Models",
            *(
                _line(model.name, model.trouble or f"{quantities.size(model.bytes)}, {model.folder}")
                for model in models
            ),
            *([_line("trouble", trouble)] if trouble else ()),
            "",
            _line("log", f"{log_file()} (written only when something fails)"),
        ]
    )


def _machine(found: Hardware) -> Iterator[str]:
    source = found.sources
    yield _line("system", found.system)
    yield _line("cpu", found.cpu, source["cpu"])
    yield _line("cores", f"{found.cores_usable} usable", source["cores_usable"])
    yield _line("", f"{found.cores_physical or '?'} physical", source["cores_physical"])
    yield _line("instructions", found.cpu_isa, source["cpu_isa"])
    yield _line("memory", quantities.memory(found.ram_total), source["ram_total"])
    yield _line("", f"{quantities.memory(found.ram_available)} available", source["ram_available"])
    limit = "no limit" if found.ram_limit is None else f"limit {quantities.memory(found.ram_limit)}"
    yield _line("container", limit, source["ram_limit"])
    if found.pinnable is not None:
        yield _line("pinnable", quantities.memory(found.pinnable), source["pinnable"])
    for gpu in found.gpus:
        yield from _gpu(gpu, found.gpu_reason)
    if several := machine.sharing(found):
        yield _line("", several)
    if found.remedy:
        yield _line("", found.remedy)
    if not found.gpus:
        yield _line("gpu", f"none: {found.gpu_reason}", source["gpus"])
    free = "?" if found.disk_free is None else f"{quantities.size(found.disk_free)} free"
    yield _line("disk", free, f"{source['disk_free']}, for {found.disk_folder}")
    yield _line("torch", f"{found.torch_version}, {found.torch_threads} threads")


def _gpu(gpu: Gpu, reason: str) -> Iterator[str]:
    free = "?" if gpu.vram_free is None else quantities.memory(gpu.vram_free)
    free = f"{free} of {quantities.memory(gpu.vram_total)} free"
    kind = gpu.capability if gpu.capability.startswith("gfx") else f"compute capability {gpu.capability or '?'}"
    memory = f"{free}, {kind}"
    yield _line("gpu", f"{gpu.name}, {memory}", gpu.source)
    if gpu.link or gpu.link_most:
        yield _line("", f"PCIe {gpu.link or '?'}, at most {gpu.link_most or '?'}", gpu.source)
    if gpu.index is None:
        yield _line("", "not usable", reason or "torch does not list it")


def _rates(measured: Measured | None) -> Iterator[str]:
    if measured is None:
        yield _line("none", "run `floe-chat doctor --measure`; it takes a few seconds")
        return
    if measured.disturbed:
        yield _line(
            "busy",
            f"other programs used {trimmed(measured.busy, 2)} cores",
            "these rates may be too low; --measure repeats them",
        )
    for name, rate in measured.rates.items():
        value = f"{trimmed(rate / 1e12)} TFLOPS" if name == rates.FLOPS else quantities.rate(rate)
        value = f"{trimmed(1e6 / rate, 2)} us a kernel" if name in rates.COUNTED else value
        yield _line(name, value, f"measured {measured.date[:10]}")
    for name, why in measured.reasons.items():
        yield _line(name, "not measured", why)


def _links(found: Hardware, links: tuple[Tuned, ...]) -> Iterator[str]:
    """How rows that do not fit a GPU's memory reach it."""
    if not links:
        why = "measured when a model that does not fit the GPU is first opened"
        yield _line("transfer", "not measured", why if found.gpus else f"there is no GPU: {found.gpu_reason}")
    for link in links:
        kind = "staged" if link.why_not else link.faster()
        beside = link.beside(kind) or "in place was not tried"
        yield _line("transfer", f"{link.device}, rows of {link.row_bytes:,} bytes", f"{link.describe(kind)} ({beside})")


def _advanced(advanced: Advanced) -> Iterator[str]:
    for name, default in dataclasses.asdict(Advanced()).items():
        value = getattr(advanced, name)
        shown = str(value).lower() if isinstance(value, bool) else value
        yield _line(name.replace("_", " "), shown, "default" if value == default else f"set in {settings_file()}")


def _line(name: str, value: str, source: str = "") -> str:
    return printable(f"  {name:<{_NAME}} {value:<{_VALUE}}  {source}".rstrip())
