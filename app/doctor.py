"""`floe-chat doctor`: what the machine has, which paths would run on it, and why."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from typing import Any

from ..engine import hardware
from ..models import catalog
from .log import log_file
from .widgets.plain import printable


def report(*, as_json: bool) -> str:
    """The findings, as text for people or as one JSON object."""
    found = hardware.probe(catalog.models_folder())
    paths = hardware.compute_paths()
    models = catalog.installed()
    if not as_json:
        return _text(found, paths, models)
    fields: dict[str, Any] = {
        "version": version("floe-chat"),
        "hardware": dataclasses.asdict(found),
        "paths": [dataclasses.asdict(path) for path in paths],
        "models": [{**dataclasses.asdict(model), "folder": str(model.folder)} for model in models],
        "log_file": str(log_file()),
    }
    return json.dumps(fields, indent=2)


def _text(found: hardware.Hardware, paths: tuple[hardware.ComputePath, ...], models: list[catalog.Installed]) -> str:
    gpus = [
        f"{gpu.name}, {_gb(gpu.vram_free)} of {_gb(gpu.vram_total)} free, compute capability {gpu.capability}"
        for gpu in found.gpus
    ]
    cores = f"{found.cores_usable} usable cores ({found.cores_physical or 'unknown'} physical)"
    return "\n".join(
        [
            f"floe-chat {version('floe-chat')}",
            "",
            "Machine",
            _line("system", found.system),
            _line("cpu", f"{found.cpu}, {cores}, {found.cpu_isa}"),
            _line("memory", f"{_gb(found.ram_available)} of {_gb(found.ram_total)} available"),
            *(_line("gpu", gpu) for gpu in gpus or [f"none: {found.gpu_reason}"]),
            _line("disk", f"{_gb(found.disk_free)} free for {found.disk_folder}"),
            _line("torch", f"{found.torch_version}, {found.torch_threads} threads"),
            "",
            "Paths",
            *(_line(path.device, f"{path.backend or 'not available'}: {path.reason}") for path in paths),
            "",
            "Models",
            *(_line(model.name, model.trouble or f"{_gb(model.bytes)}, {model.folder}") for model in models),
            "",
            _line("log", f"{log_file()} (written only when something fails)"),
        ]
    )


def _line(name: str, text: str) -> str:
    return printable(f"  {name:<8} {text}")


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
