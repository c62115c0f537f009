"""What the probe reads, also on machines that are made up, and what follows from it: device, threads and presets."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from floe_chat.engine import quality_presets
from floe_chat.engine.machine import containers, gpus, hardware
from floe_chat.engine.machine.gpus import Gpu
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.rule import Rule
from floe_chat.kernels.types import X_BITS
from floe_chat.models.pack.manifest import Manifest, TunedPreset

from .fake_nvml import device, library

GB = 1 << 30
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
        ("cpu:0", [CARD], "cpu"),
        ("CPU", [CARD], "cpu"),
        ("Cuda:0", [CARD], "cuda:0"),
        ("auto", [], "cpu"),
        ("auto", [CARD], "cuda:0"),
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


@pytest.mark.usefixtures("no_library")
def test_each_gpu_has_a_path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("floe_chat.kernels.triton")
    old = replace(CARD, name="Old", capability="7.0", index=1)
    with_gpus(monkeypatch, replace(CARD, index=0), old)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(7, 5), (7, 0)].__getitem__)
    monkeypatch.setattr(kernels, "choose", {"cpu": kernels.choose("cpu")}.__getitem__)  # no card is touched
    paths = hardware.compute_paths()
    assert [(path.device, path.backend) for path in paths[1:]] == [("cuda:0", "triton"), ("cuda:1", "reference")]
    assert "7.5, in float16" in paths[1].reason
    assert all("needs compiled code, and it was not compiled" in path.reason for path in paths[1:])


def test_small_experts_get_one_thread_and_large_ones_the_cores() -> None:
    assert hardware.choose_threads(64, 96)[0] == 1
    threads, reason = hardware.choose_threads(4096, 14336)
    assert threads >= 1 and str(threads) in reason


def test_measured_shares_do_not_change_how_x_is_read(exact_pack: Path) -> None:
    tuned = tuple(TunedPreset(name, Rule(0.1, 0.2), 0.01, 1e6) for name in ("High", "Balanced", "Fast"))
    manifest = Manifest.read(exact_pack)
    for each in (manifest, replace(manifest, tuned=tuned)):
        found = {preset.name: preset.x_bits for preset in quality_presets.of(each)}
        assert found == {"Exact": 22, "High": 15, "Balanced": 8, "Fast": 8} and {*found.values()} <= {*X_BITS}
    assert quality_presets.get("Balanced", replace(manifest, tuned=tuned)).rule.sparsity == 0.1


@pytest.mark.parametrize(("sparsity", "x_bits"), [(0.0, 15), (0.59, 15), (0.6, 8), (0.9, 8)])
def test_ones_own_preset_is_as_coarse_as_one_that_skips_as_much(exact_pack: Path, sparsity: float, x_bits: int) -> None:
    assert quality_presets.custom(Manifest.read(exact_pack), Rule(sparsity)).x_bits == x_bits


def tree(root: Path, files: dict[str, str | int]) -> Path:
    """Files below `root`, which stands for /."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


class TestMemoryLimits:
    def test_the_tightest_group_above_counts(self, tmp_path: Path) -> None:
        root = tree(
            tmp_path,
            {
                "proc/self/cgroup": "0::/pod/box",
                "sys/fs/cgroup/pod/box/memory.max": 8 * GB,
                "sys/fs/cgroup/pod/box/memory.current": GB,
                "sys/fs/cgroup/pod/memory.max": 4 * GB,
                "sys/fs/cgroup/pod/memory.current": 3 * GB,
                "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GB}",
            },
        )
        found = containers.memory(root)
        assert found and (found.limit, found.used, found.source) == (4 * GB, 2 * GB, "/sys/fs/cgroup/pod/memory.max")

    def test_version_1_and_its_way_to_say_none(self, tmp_path: Path) -> None:
        limit = "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes"
        root = tree(
            tmp_path,
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n0::/",
                limit: 2 * GB,
                "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": GB,
                "sys/fs/cgroup/memory/docker/abc/memory.stat": f"total_inactive_file {GB // 2}",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            },
        )
        found = containers.memory(root)
        assert found and (found.limit, found.used) == (2 * GB, GB // 2)
        (root / limit).write_text("9223372036854771712")
        assert containers.memory(root) is None

    def test_a_group_that_is_mounted_under_another_name(self, tmp_path: Path) -> None:
        """In a container /proc may name the host's group, while the mount begins at the container's own."""
        files: dict[str, str | int] = {
            "proc/self/cgroup": "0::/host/only",
            "sys/fs/cgroup/memory.max": GB,
            "sys/fs/cgroup/memory.current": "rubbish",
        }
        found = containers.memory(tree(tmp_path, files))
        assert found and (found.limit, found.used) == (GB, 0)

    @pytest.mark.parametrize("line", ["", "0::/../../etc", "rubbish", "0::", ":::::", "4:memory:/x", "\udcff"])
    def test_what_makes_no_sense_is_no_limit(self, tmp_path: Path, line: str) -> None:
        root = tree(tmp_path, {"sys/fs/cgroup/memory.max": "max", "etc/memory.max": 1})
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_bytes(line.encode(errors="surrogateescape"))
        assert containers.memory(root) is None and containers.cores(root) is None

    @pytest.mark.parametrize(
        ("limit", "cores"),
        [("150000 100000", 2), ("max 100000", 8), ("10000 100000", 1), ("9900000 100000", 8), ("", 8)],
    )
    def test_cpu_time_limits_cores(self, tmp_path: Path, limit: str, cores: int) -> None:
        root = tree(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": limit} if limit else {})
        assert containers.usable_cores(8, root) == cores

    def test_cpu_time_of_version_1(self, tmp_path: Path) -> None:
        cpu = "sys/fs/cgroup/cpu,cpuacct/box"
        files: dict[str, str | int] = {f"{cpu}/cpu.cfs_quota_us": 300000, f"{cpu}/cpu.cfs_period_us": 100000}
        root = tree(tmp_path, {"proc/self/cgroup": "3:cpu,cpuacct:/box", **files})
        assert containers.cores(root) == 3
        (root / cpu / "cpu.cfs_quota_us").write_text("-1")
        assert containers.cores(root) is None


class TestProbe:
    def test_a_containers_limit_is_the_memory_there_is(self, tmp_path: Path) -> None:
        files: dict[str, str | int] = {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": GB,
            "sys/fs/cgroup/memory.current": GB // 4,
        }
        found = hardware.probe(tmp_path, tree(tmp_path, files))
        assert found.ram_total == found.ram_limit == GB and found.ram_available == GB - GB // 4
        assert "container" in found.sources["ram_total"] and "memory.max" in found.sources["ram_available"]
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(str(1 << 50))  # above what the machine has
        found = hardware.probe(tmp_path, tmp_path)
        assert found.ram_total == psutil.virtual_memory().total and found.ram_available <= found.ram_total

    @pytest.mark.parametrize(("wsl", "share"), [(True, 0.5), (False, 0.9)])
    def test_windows_lends_half_of_its_memory_to_a_gpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wsl: bool, share: float
    ) -> None:
        monkeypatch.setattr("platform.system", lambda: "Linux")
        monkeypatch.setattr(hardware, "_gpus", lambda: ((Gpu("A", "8.6", 8 * GB, 6 * GB, 0),), ""))
        release = "5.15.167.4-microsoft-standard-WSL2" if wsl else "6.8"
        found = hardware.probe(tmp_path, tree(tmp_path, {"proc/sys/kernel/osrelease": release}))
        assert found.pinnable and abs(found.pinnable / found.ram_total - share) < 0.01
        assert found.sources["pinnable"]
        assert found.wsl is wsl and ("WSL" in found.system) is wsl

    def test_an_empty_proc_is_a_gap_and_no_crash(self, tmp_path: Path) -> None:
        found = hardware.probe(tmp_path, tmp_path / "nothing")
        assert found.cpu and found.ram_limit is None and found.sources["cpu"] == "the system"

    def test_a_disk_that_does_not_answer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def usage(_path: Path) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("shutil.disk_usage", usage)
        found = hardware.probe(tmp_path)
        assert found.disk_free is None and "Input/output error" in found.sources["disk_free"]


class TestDriver:
    def test_everything_is_told(self) -> None:
        one = device(
            capability=(8, 6), uuid=b"GPU-1", generation=1, lanes=16, most_generation=4, most_lanes=16, name=b"RTX 3090"
        )
        found, reason = gpus.of_driver(library([one]))
        assert found == (
            Gpu("RTX 3090", "8.6", 24 * GB, 20 * GB, None, "NVML", "GPU-1", link="1.0 x16", link_most="4.0 x16"),
        )
        assert reason == ""
        (silent,), _ = gpus.of_driver(library([device(generation=3)]))
        assert (silent.capability, silent.link, silent.link_most) == ("", "", "")

    def test_a_failure_in_the_middle_keeps_what_was_told_before(self) -> None:
        found, reason = gpus.of_driver(library([device(), device()], fails_at=1))
        assert len(found) == 1 and "GPU is lost" in reason

    @pytest.mark.parametrize("broken", [library([], starts=False), library([]), library([{"name": "half"}])])
    def test_a_library_that_fails_is_a_reason(self, broken: Any) -> None:
        found, reason = gpus.of_driver(broken)
        assert found == () and reason

    @pytest.mark.parametrize(("told", "cuda"), [(12040, (12, 4)), (13000, (13, 0)), (11080, (11, 8)), (None, None)])
    def test_the_cuda_that_the_driver_runs(self, told: int | None, cuda: tuple[int, int] | None) -> None:
        assert gpus.cuda_of_driver(library([device()], cuda=told)) == cuda
        assert gpus.cuda_of_driver(library([], starts=False, cuda=12040)) is None

    def test_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
        assert gpus.of_driver() == ((), "nvidia-ml-py is not installed")

    def test_torchs_devices_are_found_without_a_context(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def touched(*_: object) -> None:
            raise AssertionError("a context takes 0.3 to 0.5 GB of the device")

        about = SimpleNamespace(name="RTX 3090", major=8, minor=6, total_memory=24 * GB, uuid="b")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", [about].__getitem__)
        monkeypatch.setattr(torch.cuda, "mem_get_info", touched)
        found = gpus.of_torch()[0]
        assert found == (Gpu("RTX 3090", "8.6", 24 * GB, None, 0, uuid="GPU-b"),)
        (both,) = gpus.merged(found, (Gpu("RTX 3090", "8.6", 24 * GB, 20 * GB, None, "NVML", "GPU-b"),))
        assert (both.index, both.vram_free) == (0, 20 * GB)

    def test_another_driver_or_link_is_another_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was measured on it is measured again."""
        with_gpus(monkeypatch)
        found = [hardware.machine_id()]
        with_gpus(monkeypatch, CARD)
        for lanes, driver in ((16, "580.95"), (16, "590.1"), (4, "590.1"), (4, "590.1")):
            card = device(most_generation=4, most_lanes=lanes)
            monkeypatch.setitem(sys.modules, "pynvml", library([card], driver=driver))
            found.append(hardware.machine_id())
        assert len({*found}) == 4 and found[-1] == found[-2]

    def test_a_card_is_woken_before_it_is_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        finished, clock = list[str](), itertools.count(0.0, 0.25)
        monkeypatch.setattr(torch.cuda, "synchronize", finished.append)
        monkeypatch.setattr(gpus.time, "perf_counter", lambda: next(clock))
        gpus.wake("cpu:0")  # stands in for one
        assert len(finished) == 3
        gpus.wake("cpu")
        assert len(finished) == 3

    def test_what_torch_keeps_of_an_earlier_model_is_free_for_the_next(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (
            ("mem_get_info", (3 * GB, 24 * GB)),
            ("memory_reserved", 20 * GB),
            ("memory_allocated", GB),
        ):
            monkeypatch.setattr(torch.cuda, name, {"cuda:0": value}.__getitem__)
        assert gpus.free("cuda:0") == 22 * GB

    def test_both_sources_are_one_device(self) -> None:
        of_torch = Gpu("RTX 3090", "8.6", 24 * GB, 22 * GB, 0, uuid="GPU-b")
        driver = (
            Gpu("RTX 3090", "8.6", 24 * GB, 1 * GB, None, "NVML", "GPU-a"),
            Gpu("RTX 3090", "8.6", 24 * GB, 20 * GB, None, "NVML", "GPU-b", "3.0 x8", "4.0 x16"),
        )
        first, second = gpus.merged((of_torch,), driver)
        assert (first.index, first.vram_free, first.link, first.source) == (0, 20 * GB, "3.0 x8", "torch and NVML")
        assert (second.index, second.uuid) == (None, "GPU-a")

    def test_a_device_that_only_the_driver_knows_is_told_but_not_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = {**device("Old", capability=(6, 1)), "memory": SimpleNamespace(total=4 * GB, free=4 * GB)}
        monkeypatch.setitem(sys.modules, "pynvml", library([old]))
        monkeypatch.setattr(hardware, "_gpus", lambda: ((), "this torch is built without CUDA"))
        found = hardware.probe(tmp_path)
        assert [gpu.name for gpu in found.gpus] == ["Old"] and found.gpus[0].index is None and found.gpu_reason


@pytest.mark.gpu
def test_a_gpus_memory_is_given_back() -> None:
    """By torch's own count: others may use the card at the same time."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    gpus.give_back()
    before, size = torch.cuda.memory_reserved(), 256 << 20
    held = torch.empty(size, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() >= before + size
    del held
    gpus.give_back()
    assert torch.cuda.memory_reserved() <= before
    gpus.wake("cuda:0")
    assert 0 < gpus.free("cuda:0") <= torch.cuda.mem_get_info()[1]
