"""What the machine has, and the choices that follow from it; machines that are not here are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from floe_chat.engine import quality_presets
from floe_chat.engine.machine import hardware
from floe_chat.engine.machine.hardware import Gpu
from floe_chat.kernels import operations as kernels
from floe_chat.models.errors import UsageError
from floe_chat.models.pack.manifest import Manifest

GB = 10**9
CARD = Gpu("Some Card", "8.6", 8 * GB, 6 * GB)


def with_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
    def found() -> tuple[tuple[Gpu, ...], str]:
        return gpus, "" if gpus else "torch sees no CUDA device"

    monkeypatch.setattr(hardware, "_gpus", found)


def test_the_probe_finds_this_machine(tmp_path: Path) -> None:
    found = hardware.probe(tmp_path / "not" / "there" / "yet")
    assert found.cpu and found.cores_usable >= 1 and found.torch_version == torch.__version__
    assert 0 < found.ram_available <= found.ram_total and found.disk_free
    assert any(gpu.index is not None for gpu in found.gpus) != bool(found.gpu_reason)
    told = {"ram_total", "ram_available", "ram_limit", "cpu", "cpu_isa", "cores_usable", "cores_physical", "disk_free"}
    assert told <= set(found.sources) and all(found.sources.values())


@pytest.mark.parametrize(
    ("wanted", "gpus", "device"),
    [
        ("cpu", [CARD], "cpu"),
        ("cpu:0", [CARD], "cpu"),
        ("CPU", [CARD], "cpu"),
        ("Cuda:0", [CARD], "cuda:0"),
        ("auto", [], "cpu"),
        ("auto", [CARD], "cuda:0"),
        ("cuda", [CARD], "cuda:0"),
        ("cuda:1", [CARD, CARD], "cuda:1"),
    ],
)
def test_a_device_is_chosen_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, wanted: str, gpus: list[Gpu], device: str
) -> None:
    with_gpus(monkeypatch, *gpus)
    chosen, reason = hardware.choose_device(wanted)
    assert chosen == device and reason


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "mps", "rubbish", "cuda:x", "", "cuda:-1", "cpu:1", "auto:0"])
def test_devices_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    with_gpus(monkeypatch)
    with pytest.raises(ValueError, match="Devices are" if wanted not in ("cuda", "cuda:0") else "no CUDA|sees no"):
        hardware.choose_device(wanted)


def test_paths_are_told_for_every_kind_of_device() -> None:
    paths = hardware.compute_paths()
    assert [path.device for path in paths] == ["cpu", "cuda"] and all(path.reason for path in paths)
    assert paths[0].backend


@pytest.mark.usefixtures("no_library")
def test_each_gpu_has_a_path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("floe_chat.kernels.triton")
    old = replace(CARD, name="Old", capability="7.0", index=1)
    with_gpus(monkeypatch, replace(CARD, index=0), old)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(8, 6), (7, 0)].__getitem__)
    monkeypatch.setattr(kernels, "choose", kernels.choose.__wrapped__)
    paths = hardware.compute_paths()
    assert [(path.device, path.backend) for path in paths[1:]] == [("cuda:0", "triton"), ("cuda:1", "reference")]
    assert all("needs compiled code, and it was not compiled" in path.reason for path in paths[1:])


def test_small_experts_get_one_thread_and_large_ones_the_cores() -> None:
    assert hardware.choose_threads(64, 96)[0] == 1
    threads, reason = hardware.choose_threads(4096, 14336)
    assert threads >= 1 and str(threads) in reason


@pytest.mark.parametrize("name", ["Balanced", "balanced", "FAST", "hIgH"])
def test_presets_are_found_in_any_case(tiny_pack: Path, name: str) -> None:
    assert quality_presets.get(name, Manifest.read(tiny_pack)).name.lower() == name.lower()


def test_exact_needs_the_sources_own_weights(tiny_pack: Path, exact_pack: Path) -> None:
    assert "Exact" not in quality_presets.available(Manifest.read(tiny_pack))
    with pytest.raises(UsageError, match="Exact") as caught:
        quality_presets.get("exact", Manifest.read(tiny_pack))
    assert "16" in caught.value.cause + caught.value.hint
    assert quality_presets.get("exact", Manifest.read(exact_pack)).rule.sparsity == 0.0


def test_presets_skip_more_and_more(exact_pack: Path) -> None:
    manifest = Manifest.read(exact_pack)
    skipped = [quality_presets.get(name, manifest).rule.sparsity for name in quality_presets.available(manifest)]
    assert skipped == sorted(set(skipped)) and skipped[0] == 0.0
