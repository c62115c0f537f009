"""The cost model: its curves, its bytes beside a real pack's, and that nothing better makes an estimate worse."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
from floe_chat.engine import quality_presets
from floe_chat.engine.planning import speed_estimate
from floe_chat.engine.planning.footprint import Footprint
from floe_chat.engine.planning.measured_figures import figures
from floe_chat.engine.planning.prompt_estimate import prefill
from floe_chat.engine.planning.speed_estimate import Held, Speeds, TokenWork, at, decode
from floe_chat.models.catalog import described, find
from floe_chat.models.catalog_entry import Recurrent
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.packing.pack import PackSpec

MIXTRAL = described("mixtral-8x7b-instruct").sizes
TAKES = Footprint.of(MIXTRAL, PackSpec())
HITS = figures().hits
BALANCED = TokenWork.of(next(preset for preset in quality_presets.PRESETS if preset.name == "Balanced"))
CARD = Speeds(read=40e9, link=12e9, gpu=250e9, disk=2e9)
RANDOM = random.Random(7)


def some_speeds() -> Speeds:
    """A machine whose GPU is faster than its CPU and its link together, as GPUs are."""
    read = RANDOM.uniform(10e9, 150e9)
    link = RANDOM.uniform(1e9, 50e9)
    return Speeds(
        read=read,
        cores=RANDOM.choice([0, 2, 8]),
        disk=RANDOM.uniform(1e8, 1e10),
        link=link,
        gpu=(read + link) * RANDOM.uniform(1.5, 20),
        gpu_flops=RANDOM.uniform(5e12, 2e14),
        host=RANDOM.choice([0.0, 4e-4]),
        host_pool=RANDOM.choice([0.0, 1e-3]),
        host_behind=RANDOM.choice([0.0, 1e-3]),
    )


class TestFootprint:
    @pytest.mark.parametrize("where", ["demo", "tiny"])
    def test_bytes_are_those_of_a_real_pack(self, where: str, tiny_pack: Path) -> None:
        folder = find("demo") if where == "demo" else tiny_pack
        manifest = Manifest.read(folder)
        w = manifest.widths
        takes = Footprint.of(described(folder).sizes, PackSpec(w.up, w.gate, w.down, w.dense, w.group, short=w.short))
        assert takes.row == manifest.row_layout().nbytes
        files = {name: entry.size for name, entry in manifest.files.items()}
        assert takes.dense == pytest.approx(files["dense.safetensors"], rel=0.02, abs=8192)
        layers = sum(size for name, size in files.items() if name.startswith("layer_"))
        assert takes.ups + takes.rows == pytest.approx(layers, rel=0.02, abs=8192 * MIXTRAL.layers)
        assert takes.disk == pytest.approx(sum(files.values()), rel=0.02, abs=1 << 18)

    def test_sixteen_bits_are_the_checkpoints_own(self) -> None:
        takes = Footprint.of(MIXTRAL, PackSpec(16, 16, 16, 16))
        assert takes.dense + takes.ups + takes.rows == 2 * MIXTRAL.parameters


class TestCurves:
    @pytest.mark.parametrize("curve", [HITS, figures().dropped])
    def test_more_never_gives_less(self, curve: speed_estimate.Curve) -> None:
        values = [at(curve, x / 100) for x in range(101)]
        assert values == sorted(values)

    def test_presets_leave_out_what_they_say(self) -> None:
        assert BALANCED.calls * BALANCED.active == pytest.approx(0.4)
        assert BALANCED.reached == pytest.approx(0.75) and BALANCED.read == pytest.approx(0.875)
        assert 0.8 < BALANCED.calls < 0.9
        exact = TokenWork.of(next(preset for preset in quality_presets.PRESETS if preset.exact))
        assert exact == TokenWork()


class TestDecode:
    def test_on_the_cpu_it_is_bytes_over_rates(self) -> None:
        speeds = Speeds(read=1e9, cpu={"up 3 bit": 2e9, "rows 4 bit": 1e9, "dense 4 bit": 4e9}, host=0.0)
        token = decode(TAKES, TokenWork(active=0.5, reached=0.5), speeds, Held(gpu=False), context=0)
        assert token.up == pytest.approx(64 * TAKES.up / 2e9)
        assert token.rows == pytest.approx(64 * 14336 * 0.5 * 0.75 * TAKES.row / 1e9)
        assert token.disk == token.host == token.moved == 0

    def test_the_cpu_and_the_link_share_what_is_absent(self) -> None:
        """With both lanes of the same rate, half as long as with one of them."""
        speeds = Speeds(
            read=1e12,
            cpu={"rows 4 bit": 1e9},
            link=1e9,
            link_latency=0,
            gpu=1e15,
            launch=0,
            host_pool=0.0,
            host_behind=0.0,
        )
        alone = decode(TAKES, TokenWork(), speeds, Held(gpu=True, pool=0.0, cpu=False), context=0)
        both = decode(TAKES, TokenWork(), speeds, Held(gpu=True, pool=0.0), context=0)
        assert alone.rows == pytest.approx(64 * 14336 * TAKES.row / 1e9, rel=0.01)
        assert both.rows == pytest.approx(alone.rows / 2, rel=0.01)
        assert both.moved == pytest.approx(alone.moved / 2, rel=0.01)

    def test_a_whole_model_on_the_gpu_moves_nothing(self) -> None:
        token = decode(TAKES, BALANCED, CARD, Held(gpu=True, pool=1.0))
        assert token.moved == 0 and token.hit == 1 and token.disk == 0

    def test_on_a_gpu_a_state_is_read_and_written_and_sometimes_copied(self) -> None:
        sizes, seconds = described("qwen3.6-35b-a3b").sizes, list[float]()
        state = sizes.recurrent
        assert isinstance(state, Recurrent)
        for wide in (1, 3):
            wider = dataclasses.replace(sizes, recurrent=dataclasses.replace(state, key_dim=wide * state.key_dim))
            takes = Footprint.of(wider, PackSpec())
            seconds.append(decode(takes, BALANCED, CARD, Held(gpu=True, pool=1.0)).seconds)
        more = 4 * state.layers * 2 * state.key_dim * state.values / CARD.gpu
        assert 2 * more < seconds[1] - seconds[0] < 3.5 * more

    def test_nothing_better_makes_it_slower(self) -> None:
        for _ in range(100):
            speeds, gpu = some_speeds(), RANDOM.random() < 0.7
            held = Held(gpu=gpu, pool=RANDOM.choice([0.0, 0.02, 0.3, 0.8]), ram=RANDOM.choice([0.1, 0.7, 1.0]))
            before = decode(TAKES, BALANCED, speeds, held).seconds
            read = 1 / prefill(TAKES, BALANCED, speeds, held)
            for name in ("read", "disk", "link", "gpu", "gpu_flops"):
                better = dataclasses.replace(speeds, **{name: getattr(speeds, name) * RANDOM.uniform(1, 3)})
                assert decode(TAKES, BALANCED, better, held).seconds <= before * 1.0001, (name, speeds, held)
                assert 1 / prefill(TAKES, BALANCED, better, held) <= read * 1.0001, (name, speeds, held)
            more = dataclasses.replace(held, ram=min(1.0, held.ram * 1.3))
            assert decode(TAKES, BALANCED, speeds, more).seconds <= before * 1.0001
            assert 1 / prefill(TAKES, BALANCED, speeds, more) <= read * 1.0001

    def test_a_larger_pool_costs_the_gpu_at_most_its_own_time(self) -> None:
        """Rows of the pool are the GPU's work, which the CPU might have done meanwhile: a few percent at the most."""
        for _ in range(300):
            speeds = some_speeds()
            pools = sorted(RANDOM.random() for _ in range(2))
            small, large = (decode(TAKES, BALANCED, speeds, Held(gpu=True, pool=pool)) for pool in pools)
            own = 64 * 14336 * TAKES.row / speeds.gpu
            assert large.seconds <= small.seconds + own * (large.hit - small.hit) * 1.0001
            assert large.moved <= small.moved * 1.0001


class TestSpeeds:
    def test_other_widths_follow_from_those_measured(self) -> None:
        speeds = Speeds(read=1e9, cpu={"rows 4 bit": 9e9})
        table = figures().kernels["rows"]
        assert speeds.of_cpu("rows", 2) == pytest.approx(9e9 * table[2] / table[4])
        assert Speeds(read=1e9).of_cpu("rows", 2) == pytest.approx(1e9 * table[2])

    def test_cores_add_up_until_memory_is_the_limit(self) -> None:
        alone, shares = figures().core_bytes_s["rows"], figures().kernels["rows"]
        assert Speeds(read=1e12, cores=3).of_cpu("rows", 4) == pytest.approx(3 * alone[4])
        assert Speeds(read=1e9, cores=64).of_cpu("rows", 4) == pytest.approx(1e9 * shares[8])
        for kind, widths in figures().core_bytes_s.items():
            for bits in widths:
                rates = [Speeds(read=40e9, cores=cores).of_cpu(kind, bits) for cores in range(1, 9)]
                assert rates == sorted(rates) and rates[-1] <= 40e9
        slow, fast = (Speeds(read=1e12, cores=3).times(factor).of_cpu("rows", 4) for factor in (0.5, 2.0))
        assert (slow, fast) == (pytest.approx(1.5 * alone[4]), pytest.approx(6 * alone[4]))
        measured = Speeds(read=1e9, cores=64, cpu={"rows 4 bit": 9e9})
        assert measured.of_cpu("rows", 4) == 9e9 and measured.of_cpu("rows", 3) == pytest.approx(9e9)
