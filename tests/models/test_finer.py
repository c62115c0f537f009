"""Checkpoints of finer experts: transformers' own models of them answer as of the source, or they are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import CheckpointError, FloeError, TryAgainError, UsageError
from floe_chat.models.families import Family
from floe_chat.models.finer import ordering, routers, shard
from floe_chat.models.finer import transform as module
from floe_chat.models.finer.cutting import Cut, parts_of
from floe_chat.models.finer.shard import Making
from floe_chat.models.finer.transform import WORK, transform
from floe_chat.models.packing.pack import EXACT
from floe_chat.models.packing.workplace import locked
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import families
from ..helpers import (
    calibration_tokens,
    edit_json,
    edit_tensors,
    make_checkpoint,
    make_pack,
    reference_model,
    relative_rms,
)

LIMIT = 1e-5  # of float32: parts add up in another order, and recurrent layers carry that on; 2.6e-6 at most was seen
REFUSED = {"phimoe", "deepseek_v3", "glm4_moe", "glm4_moe_lite"}  # as tests/families.py has them, with groups
SIZES = {"intermediate_size": 40, "moe_intermediate_size": 24}  # which 4 divides
EXTRA: dict[str, dict[str, Any]] = {
    "olmoe normalized": {**families.MODELS["olmoe"], "norm_topk_prob": True},
    "qwen2_moe normalized": {**families.MODELS["qwen2_moe"], "norm_topk_prob": True},
    "glm4_moe by scores": {**families.MODELS["glm4_moe normalized"], "norm_topk_prob": False},
    "glm4_moe_lite one group": {**families.MODELS["glm4_moe_lite"], "n_group": 1},
    "deepseek_v3 all groups": {**families.MODELS["deepseek_v3"], "topk_group": 2},
}
EXACT_ONES = [name for name in [*families.MODELS, *EXTRA] if name not in REFUSED]


@pytest.fixture(autouse=True)
def divisible(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fields in {**families.MODELS, **EXTRA}.items():
        monkeypatch.setitem(families.MODELS, name, {**SIZES, **fields})


def silent(_step: str, _share: float) -> None: ...


def logits(checkpoint: Path, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return reference_model(checkpoint)(input_ids=tokens, use_cache=False).logits


def fresh_tokens() -> Tensor:
    return torch.randint(3, 250, (3, 40), generator=torch.Generator().manual_seed(77))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.some(4)
@pytest.mark.parametrize(("parts", "ordered"), [(4, False), (2, True)], ids=["as they are", "by importance"])
@pytest.mark.parametrize("name", EXACT_ONES)
def test_transformers_answers_the_same(tmp_path: Path, name: str, parts: int, ordered: bool) -> None:
    source, out = families.make(name, tmp_path / "source"), tmp_path / "out"
    before = contents(source)
    done = transform(source, out, parts, calibration_tokens() if ordered else None, silent)
    first, finer = Checkpoint(source), Checkpoint(out)
    assert (finer.experts, finer.neurons) == (parts * first.experts, first.neurons // parts)
    assert (done.experts, done.neurons) == (finer.experts, finer.neurons)
    assert finer.config.num_experts_per_tok == done.top_k == parts * first.config.num_experts_per_tok
    assert type(finer.storage) is type(first.storage), "the published layout"
    assert not (out / WORK).exists() and contents(source) == before
    tokens = fresh_tokens()
    assert relative_rms(logits(out, tokens), logits(source, tokens)) <= LIMIT


PACKED = "mixtral", "qwen3_next", "gpt_oss", "glm4_moe normalized", "lfm2_moe"  # each kind of storage and router


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in PACKED else pytest.mark.thorough) for name in EXACT_ONES]
)
def test_its_pack_answers_the_same(tmp_path: Path, name: str) -> None:
    """The finer checkpoint is a checkpoint like any other for our own packer."""
    from floe_chat.engine.decoder.kv_cache import KVCache

    from ..engine.driver import open_model

    source = families.make(name, tmp_path / "source")
    transform(source, tmp_path / "out", 2, None, silent)
    manifest = make_pack(tmp_path / "out", tmp_path / "pack", EXACT)
    assert manifest.architecture.intermediate == Checkpoint(source).neurons // 2
    ids: list[int] = fresh_tokens()[0].tolist()
    got = open_model(tmp_path / "pack", "Exact").decoder.forward(ids, KVCache())
    assert relative_rms(got, logits(source, torch.tensor([ids]))[0, -1:]) <= 1e-5


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_routers_that_cannot_are_refused(tmp_path: Path, name: str) -> None:
    source = families.make(name, tmp_path / "source")
    with pytest.raises(CheckpointError, match="cannot be given finer experts") as caught:
        transform(source, tmp_path / "out", 2, None, silent)
    assert ("SparseMixer" if name == "phimoe" else "groups") in caught.value.cause
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_what_is_refused_would_be_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal of groups is not timidity: without it, the answers differ."""
    source = families.make("glm4_moe", tmp_path / "source")

    def allowed(_family: Family, _config: Any, parts: int) -> routers.FinerRouter:
        return routers.FinerRouter(parts, 1.0)

    for place in (shard, module):
        monkeypatch.setattr(place, "finer_router", allowed)
    transform(source, tmp_path / "out", 2, None, silent)
    tokens = fresh_tokens()
    assert relative_rms(logits(tmp_path / "out", tokens), logits(source, tokens)) > 1e-2


def test_blocks_of_four_bits_stay_blocks(tmp_path: Path) -> None:
    """gpt-oss as published: exponents are raised, so that codes stand for twice the value, and nothing is rounded."""
    plain, coded = families.make_coded(tmp_path, neurons=64)
    for source, ordered in ((plain, True), (coded, True), (coded, False)):
        out = tmp_path / f"{source.name}-{ordered}"
        transform(source, out, 2, calibration_tokens() if ordered else None, silent)
        whole, finer = Checkpoint(source), Checkpoint(out)
        assert type(whole.storage) is type(finer.storage)
        x = torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
        for expert in range(whole.experts):
            both = (added(finer, 2 * expert + part, x) for part in range(2))
            assert relative_rms(sum(both, torch.tensor(0.0)) / 2, added(whole, expert, x)) <= LIMIT
    with pytest.raises(CheckpointError, match="4 parts") as caught:
        transform(coded, tmp_path / "four", 4, None, silent)
    assert "blocks of 32" in caught.value.cause


def added(checkpoint: Checkpoint, expert: int, x: Tensor) -> Tensor:
    """What one expert of the second layer adds for x (T, H), with weight 1."""
    gate, up, down, biases = checkpoint.whole_expert(1, expert)
    assert biases is not None
    g, u = x @ gate.float().T + biases.gate, x @ up.float().T + biases.up
    g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
    return (g * torch.sigmoid(1.702 * g) * (u + 1)) @ down.float().T + biases.down


def test_important_neurons_come_into_the_first_part(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    tokens = calibration_tokens()
    transform(source, tmp_path / "out", 2, tokens, silent)
    finer = Checkpoint(tmp_path / "out")
    seen: dict[int, list[Tensor]] = {}
    model = reference_model(source)
    block = model.model.layers[1].mlp

    def before(_module: Any, given: tuple[Tensor, Tensor, Tensor]) -> None:
        hidden, chosen, _ = given
        for expert in range(4):
            seen.setdefault(expert, []).append(hidden[(chosen == expert).any(1)])

    block.experts.register_forward_pre_hook(before)
    with torch.inference_mode():
        model(input_ids=tokens, use_cache=False)
    for expert in range(4):
        x = torch.cat(seen[expert])
        energies = [energy(finer, 2 * expert + part, x) for part in range(2)]
        assert energies[0].min() >= energies[1].max() * 0.98  # the layer before was measured in bfloat16, perhaps


def energy(checkpoint: Checkpoint, expert: int, x: Tensor) -> Tensor:
    gate, up, down = (part.float() for part in checkpoint.expert(1, expert))
    h = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    return h.square().sum(0) * down.square().sum(0)


def test_other_parts_of_a_model_are_copied_and_guessing_ones_left_out(tmp_path: Path) -> None:
    """What a model sees with stays; the layer that guesses a second token has experts of the old size."""
    seeing = families.make("qwen3_5_moe", tmp_path / "seeing")
    transform(seeing, tmp_path / "a", 2, None, silent)
    old, new = Checkpoint(seeing), Checkpoint(tmp_path / "a")
    assert old.unused and old.unused.keys() == new.unused.keys()
    weights = {name: t for path in (tmp_path / "a").glob("*.safetensors") for name, t in load_file(path).items()}
    for path in seeing.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert name not in old.unused or torch.equal(tensor, weights[name])

    guessing = families.one_shard(families.make("glm4_moe normalized", tmp_path / "guessing"))
    again = load_file(guessing / "model.safetensors")
    more = {name.replace("layers.2.", "layers.3."): t.clone() for name, t in again.items() if ".layers.2." in name}
    save_file(again | more, guessing / "model.safetensors", {"format": "pt"})
    edit_json(guessing / "config.json", lambda fields: fields.update(num_nextn_predict_layers=1))
    assert transform(guessing, tmp_path / "b", 2, None, silent).without_guessing
    assert not Checkpoint(tmp_path / "b").unused
    assert Checkpoint(tmp_path / "b").config.num_nextn_predict_layers == 0


def test_a_config_that_relies_on_defaults(tmp_path: Path) -> None:
    """What config.json leaves out is stated, by the name that transformers reads."""
    source = make_checkpoint(tmp_path / "source", experts=8)

    def drop(fields: dict[str, Any]) -> None:
        del fields["num_local_experts"], fields["num_experts_per_tok"]

    edit_json(source / "config.json", drop)
    transform(source, tmp_path / "out", 2, None, silent)
    tokens = fresh_tokens()
    assert relative_rms(logits(tmp_path / "out", tokens), logits(source, tokens)) <= LIMIT


def _overflows(name: str, tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, 40_000.0) if name.endswith("experts.1.w2.weight") else tensor


def _not_finite(name: str, tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan) if name.endswith("experts.1.w1.weight") else tensor


@pytest.mark.parametrize(("change", "says"), [(_overflows, "beyond its type"), (_not_finite, "not finite")])
def test_values_that_cannot_be_scaled(tmp_path: Path, change: Callable[..., Tensor], says: str) -> None:
    """float16 ends at 65,504."""
    source, out = make_checkpoint(tmp_path / "source", dtype=torch.float16), tmp_path / "out"
    edit_tensors(source, change)
    with pytest.raises(CheckpointError, match="cannot be cut") as caught:
        transform(source, out, 2, None, silent)
    assert says in caught.value.cause
    assert not (out / "config.json").exists()


@pytest.mark.parametrize("kind", ["quantized", "cut off", "missing router", "missing shard", "gone", "odd"])
def test_sources_that_cannot_be_read(tmp_path: Path, kind: str) -> None:
    source, out = make_checkpoint(tmp_path / "source", intermediate=97 if kind == "odd" else 96), tmp_path / "out"
    match kind:
        case "quantized":
            edit_json(source / "config.json", lambda f: f.update(quantization_config={"quant_method": "torchao"}))
        case "cut off":
            os.truncate(min(source.glob("*.safetensors")), 1000)
        case "missing router":
            families.one_shard(source)
            edit_tensors(source, lambda name, tensor: None if "layers.1.block_sparse_moe.gate" in name else tensor * 1)
        case "missing shard":
            max(source.glob("*.safetensors")).unlink()
        case "gone":
            source = tmp_path / "elsewhere"
        case _:
            pass
    with pytest.raises(FloeError) as caught:
        transform(source, out, 2, None, silent)
    assert caught.value.cause and not out.exists()


def test_folders_that_are_not_ours(tmp_path: Path) -> None:
    source, other = make_checkpoint(tmp_path / "source"), tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    before = contents(source)
    for folder in (source, source / "inside", other, other / "thesis.txt", tmp_path):
        with pytest.raises(UsageError):
            transform(source, folder, 2, None, silent)
    assert contents(source) == before and not (source / "inside").exists()
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    transform(source, tmp_path / "out", 2, None, silent)
    with pytest.raises(UsageError, match="holds other files"):
        transform(source, tmp_path / "out", 2, None, silent)


class _Killed(BaseException): ...


@pytest.mark.parametrize(
    "ordered",
    [pytest.param(False, id="as they are", marks=pytest.mark.thorough), pytest.param(True, id="by importance")],
)
def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    source, tokens = make_checkpoint(tmp_path / "source", layers=3), calibration_tokens() if ordered else None
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    transform(source, whole, 2, tokens, silent)
    written, measured = list[str](), list[int]()
    write, falling = Making.write, ordering.falling

    def once(self: Making, path: Path, file: str) -> None:
        if len(written) == 2:
            raise _Killed
        write(self, path, file)
        written.append(file)

    def counted(values: Tensor, unit: int) -> Tensor:
        if len(measured) == 5:  # inside the second layer
            measured.append(0)
            raise _Killed
        measured.append(0)
        return falling(values, unit)

    monkeypatch.setattr(Making, "write", once)
    monkeypatch.setattr(ordering, "falling", counted)
    for _ in range(1 + ordered):
        with pytest.raises(_Killed):
            transform(source, cut, 2, tokens, silent)
        assert not (cut / "config.json").exists() and (cut / WORK).is_dir()
    assert len(measured) == (6 + 8 if ordered else 0), "the first layer is not measured again"
    with pytest.raises(UsageError, match="other options"):
        transform(source, cut, 4, tokens, silent)
    first = {path.name: path.stat().st_mtime_ns for path in cut.glob("*.safetensors")}
    assert [*first] and {*first} == {*written}
    monkeypatch.setattr(Making, "write", write)
    transform(source, cut, 2, tokens, silent)
    assert contents(cut) == contents(whole)
    assert all((cut / name).stat().st_mtime_ns == time for name, time in first.items()), "not written twice"


KILLED = """
import os, signal, sys
from pathlib import Path
from floe_chat.models.finer import shard, transform

copied = shard.Making._copy
shard.Making._copy = lambda self, file, name, out: (
    os.kill(os.getpid(), signal.SIGKILL) if "layers.1" in name else copied(self, file, name, out)
)
transform.transform(Path(sys.argv[1]), Path(sys.argv[2]), 2, None, lambda *_: None)
"""


@pytest.mark.thorough
@pytest.mark.skipif(os.name == "nt", reason="no such signal")
def test_a_killed_run_leaves_nothing_that_could_be_taken_for_a_model(tmp_path: Path) -> None:
    source, cut = make_checkpoint(tmp_path / "source"), tmp_path / "cut"
    ran = subprocess.run([sys.executable, "-c", KILLED, str(source), str(cut)], check=False)
    assert ran.returncode == -signal.SIGKILL and list(cut.glob("*.part"))
    with pytest.raises(CheckpointError):
        Checkpoint(cut)
    transform(source, cut, 2, None, silent)
    transform(source, tmp_path / "whole", 2, None, silent)
    assert contents(cut) == contents(tmp_path / "whole") and not list(cut.glob("*.part"))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    source, work = make_checkpoint(tmp_path / "source"), tmp_path / "out" / WORK
    work.mkdir(parents=True)
    with locked(work / "lock", "held"), pytest.raises(TryAgainError):
        transform(source, tmp_path / "out", 2, None, silent)


def test_a_disk_that_is_too_small_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "source")

    def nearly_full(_folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=1 << 20)

    monkeypatch.setattr("floe_chat.models.finer.transform.shutil.disk_usage", nearly_full)
    with pytest.raises(FloeError, match="too small"):
        transform(source, tmp_path / "out", 2, None, silent)
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("cut", [Cut(0), Cut(1), Cut(0, "halves"), Cut(1, "turns"), Cut(0, "turns")], ids=str)
def test_parts_hold_every_neuron_once(cut: Cut) -> None:
    """Parts put together again are the expert, in the order that was asked for."""
    neurons, other = 12, 5
    order = torch.randperm(neurons, generator=torch.Generator().manual_seed(2))
    ids = torch.arange(neurons).double()
    if cut.sides == "halves":
        line, wanted = torch.cat([ids, ids + 100]), [(ids + 100 * side)[order] for side in range(2)]
    elif cut.sides == "turns":
        line, wanted = torch.stack([ids, ids + 100], 1).flatten(), [(ids + 100 * side)[order] for side in range(2)]
    else:
        line, wanted = ids, [ids[order]]
    axis = cut.axis or 0
    tensor = line[:, None].expand(-1, other) if axis == 0 else line.expand(other, -1)
    parts = [part.select(1 - axis, 0) for part in parts_of(tensor, cut, order, 4, 4)]
    for side, whole in enumerate(wanted):
        found = [part.chunk(2)[side] if cut.sides == "halves" else part[side :: len(wanted)] for part in parts]
        assert torch.equal(torch.cat(found), whole)
