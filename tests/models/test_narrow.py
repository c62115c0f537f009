"""Packs whose rarely used experts have fewer bits: which those are, that a kill changes no byte, what is refused."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import PackError, UsageError
from floe_chat.models.manifest import FILE_NAME, MIXED_VERSION, VERSION, Manifest
from floe_chat.models.pack import EXACT, PackSpec, expected_bytes, make_manifest, pack
from floe_chat.models.pack_experts import rarest
from floe_chat.models.packed import PackedModel
from floe_chat.models.repair import repair
from floe_chat.models.verify import compare, damages
from floe_chat.models.widths import Narrow
from torch import Tensor

from ..helpers import calibration_tokens, edit_json, explained, make_checkpoint, run_cli

NARROW = Narrow(0.3, up=2, gate=3, down=3)
SPEC = PackSpec(up=4, gate=4, down=8, dense=8, narrow=NARROW)
SHAPE: dict[str, Any] = {"hidden": 36, "intermediate": 50, "experts": 7, "top_k": 2, "layers": 3}
RARE = 2  # 30 % of 7


class CutError(BaseException):
    """Ends packing wherever it is, as a kill would."""


def packed(source: Path, folder: Path, spec: PackSpec = SPEC) -> Manifest:
    return pack(Checkpoint(source), folder, spec, calibration_tokens(), "tiny")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def silent(_step: str, _share: float, _left: float | None = None) -> None:
    pass


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("narrow") / "source", **SHAPE)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("narrow") / "whole"
    packed(source, folder)
    return folder


def test_the_experts_that_the_text_used_least_are_narrow_and_the_manifest_says_why(whole: Path) -> None:
    manifest = Manifest.read(whole)
    popularity = PackedModel(whole, manifest).profile()["popularity"]
    assert manifest.widths.narrow == NARROW and "the least used 30 % of experts: up 2" in manifest.widths.describe()
    assert len({rare.experts for rare in manifest.rare}) > 1, "each layer has its own"
    for rare, shares in zip(manifest.rare, popularity, strict=True):
        assert len(rare.experts) == RARE
        assert rare.popularity == pytest.approx(shares[list(rare.experts)].tolist(), rel=1e-6)
        others = [share for expert, share in enumerate(shares.tolist()) if expert not in rare.experts]
        assert max(rare.popularity) <= min(others) + 1e-6


def test_equally_rare_experts_are_taken_by_number() -> None:
    rare = rarest(torch.tensor([[4, 1], [1, 4], [0, 4]]), 5, 3)
    assert rare.experts == (0, 2, 3) and rare.popularity == (1 / 6, 0.0, 0.0)


def test_each_expert_is_stored_with_its_own_widths(whole: Path, source: Path) -> None:
    model = PackedModel.open(whole, recheck=True)
    found = compare(model, Checkpoint(source), range(SHAPE["layers"]), silent)
    assert all(matrix.good for matrix in found)
    bits = {matrix.name: matrix.bits for matrix in found if "expert" in matrix.name}
    for layer, rare in enumerate(model.manifest.rare):
        for expert in range(SHAPE["experts"]):
            parts = [bits[f"layer {layer + 1}, expert {expert + 1}, {part}"] for part in ("up", "gate", "down")]
            assert parts == ([2, 3, 3] if expert in rare.experts else [4, 4, 8])


def test_bytes_are_what_is_expected_and_less_than_without(whole: Path, source: Path) -> None:
    manifest = Manifest.read(whole)
    layers = sum(entry.size for name, entry in manifest.files.items() if name.startswith("layer_"))
    usual = make_manifest(Checkpoint(source), PackSpec(4, 4, 8, 8), calibration_tokens(), "usual")
    assert expected_bytes(manifest, 0) < expected_bytes(usual, 0)
    assert layers == pytest.approx(expected_bytes(manifest, 0), rel=0.15)


def test_a_pack_without_narrow_experts_is_as_it_always_was(source: Path, tmp_path: Path) -> None:
    packed(source, tmp_path, PackSpec())
    fields = json.loads((tmp_path / FILE_NAME).read_text())
    assert fields["version"] == VERSION and "rare" not in fields and "narrow" not in fields["widths"]


@pytest.mark.parametrize(("layer", "expert"), [(0, 0), (0, 3), (1, 0), (2, 6)])
def test_a_cut_at_any_expert_changes_no_byte(
    tmp_path: Path, source: Path, whole: Path, layer: int, expert: int
) -> None:
    original = Checkpoint.expert

    def read(self: Checkpoint, asked_layer: int, asked: int) -> tuple[Tensor, Tensor, Tensor]:
        if (asked_layer, asked) == (layer, expert):
            raise CutError
        return original(self, asked_layer, asked)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CutError):
        patch.setattr(Checkpoint, "expert", read)
        packed(source, tmp_path)
    packed(source, tmp_path)
    assert contents(tmp_path) == contents(whole)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the child is forked, so that it need not import torch")
def test_kills_at_random_moments_change_no_byte(tmp_path: Path, source: Path, whole: Path) -> None:
    begun, chance, killed = time.monotonic(), random.Random(0), 0
    packed(source, tmp_path / "undisturbed")
    usual = time.monotonic() - begun
    for _ in range(5):
        child = os.fork()
        if child == 0:
            # Whatever happens here, pytest must not go on in two processes.
            try:
                packed(source, tmp_path / "p")
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0, 0.5) * usual)
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    if not (tmp_path / "p" / FILE_NAME).exists():
        packed(source, tmp_path / "p")
    assert killed and contents(tmp_path / "p") == contents(whole)


@pytest.mark.parametrize("files", [["layer_01.safetensors"], ["profile.safetensors"]], ids=" ".join)
def test_repair_keeps_to_the_choice_of_the_manifest(
    whole: Path, source: Path, tmp_path: Path, files: list[str]
) -> None:
    damaged = Path(shutil.copytree(whole, tmp_path / "damaged"))
    for name in files:
        raw = bytearray((damaged / name).read_bytes())
        raw[len(raw) // 2] ^= 4
        (damaged / name).write_bytes(raw)
    assert [damage.file for damage in damages(damaged, Manifest.read(damaged), silent)] == files
    assert repair(Checkpoint(source), damaged, files, calibration_tokens(), silent) == []
    assert contents(damaged) == contents(whole)


def test_an_interrupted_pack_of_another_choice_is_not_gone_on_with(tmp_path: Path, source: Path) -> None:
    def write(_manifest: Manifest, _folder: Path) -> None:
        raise CutError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CutError):
        patch.setattr(Manifest, "write", write)
        packed(source, tmp_path)
    other = PackSpec(up=4, gate=4, down=8, dense=8)
    with pytest.raises(UsageError) as caught:
        packed(source, tmp_path, other)
    assert "choice of narrow experts is the least used 30 %" in caught.value.cause and "not none" in caught.value.cause


WRONG: dict[str, Callable[[Any], None]] = {
    "no-choice": lambda fields: fields.pop("rare"),
    "choice-of-one-layer": lambda fields: fields["rare"].pop(),
    "nothing": lambda fields: fields.update(rare=None),
    "a-number": lambda fields: fields["rare"].__setitem__(0, 3),
    "no-expert": lambda fields: fields["rare"][0]["experts"].pop(),
    "twice": lambda fields: fields["rare"][0].update(experts=[3, 3]),
    "falling": lambda fields: fields["rare"][0]["experts"].reverse(),
    "beyond": lambda fields: fields["rare"][1].update(experts=[0, 7]),
    "negative": lambda fields: fields["rare"][1].update(experts=[-1, 0]),
    "text": lambda fields: fields["rare"][1].update(experts=["0", "1"]),
    "no-popularity": lambda fields: fields["rare"][2].pop("popularity"),
    "not-mixed": lambda fields: fields["widths"].pop("narrow"),
    "no-widths": lambda fields: fields["widths"].update(narrow={}),
    "a-width": lambda fields: fields["widths"]["narrow"].update(up=5),
    "wider": lambda fields: fields["widths"]["narrow"].update(up=8),
    "share": lambda fields: fields["widths"]["narrow"].update(share=0.5),
    "all": lambda fields: fields["widths"]["narrow"].update(share=1.0),
    "absurd": lambda fields: fields["widths"]["narrow"].update(share=float("nan")),
    "version": lambda fields: fields.update(version=VERSION),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_manifest_that_cannot_be_is_refused(whole: Path, tmp_path: Path, change: Callable[[Any], None]) -> None:
    fields = json.loads((whole / FILE_NAME).read_text())
    assert fields["version"] == MIXED_VERSION
    changed = copy.deepcopy(fields)
    change(changed)
    assert changed != fields or changed["widths"]["narrow"]["share"] != changed["widths"]["narrow"]["share"]
    (tmp_path / FILE_NAME).write_text(json.dumps(changed))
    with pytest.raises(PackError) as caught:
        Manifest.read(tmp_path)
    assert "damaged" in caught.value.title and caught.value.cause


def test_another_choice_than_was_packed_is_found_out(whole: Path, source: Path, tmp_path: Path) -> None:
    """The files are sound: what they hold is seen to be others' weights only beside the source."""
    changed = Path(shutil.copytree(whole, tmp_path / "changed"))

    def exchange(fields: Any) -> None:
        rare = fields["rare"][0]["experts"]
        fields["rare"][0]["experts"] = sorted(set(range(7)) - set(rare))[:RARE]

    edit_json(changed / FILE_NAME, exchange)
    found = compare(PackedModel.open(changed), Checkpoint(source), [0], silent)
    assert not all(matrix.good for matrix in found)


REFUSED = {
    "none": (("--narrow-share", "0"), "between 0 and 1"),
    "all": (("--narrow-share", "1"), "between 0 and 1"),
    "negative": (("--narrow-share", "-0.5"), "between 0 and 1"),
    "nan": (("--narrow-share", "nan"), "between 0 and 1"),
    "too-small": (("--narrow-share", "0.01"), "1 % of 7 experts are 0"),
    "too-large": (("--narrow-share", "0.99"), "99 % of 7 experts are 7"),
    "wider": (("--narrow-share", "0.3", "--narrow-up", "8"), "up of narrow experts cannot be 8 bit"),
    "wider-rows": (
        ("--narrow-share", "0.3", "--rows", "2", "--narrow-rows", "3"),
        "gate of narrow experts cannot be 3 bit",
    ),
    "alike": (("--narrow-share", "0.3", "--up", "2"), "would not be narrower"),
    "no-width": (("--narrow-share", "0.3", "--narrow-rows", "1"), "cannot be 1 bit"),
    "exact": (("--narrow-share", "0.3", "--up", "16", "--rows", "16"), "16-bit experts cannot have narrow ones"),
    "no-share": (("--narrow-up", "2"), "--narrow-share"),
    "word": (("--narrow-share", "few"), "few"),
}


@pytest.mark.parametrize(("options", "told"), REFUSED.values(), ids=REFUSED)
def test_choices_that_make_no_sense_are_explained(
    source: Path, tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    ran = run_cli("pack", str(source), str(tmp_path / "out"), *options)
    assert told in explained(ran, 2)
    assert not (tmp_path / "out").exists()


def test_the_command_packs_verifies_and_answers(source: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    ran = run_cli("pack", str(source), folder, "--narrow-share", "0.3")
    assert (
        ran.code == 0
        and "gate and down 4, attention 4 bits; the least used 30 % of experts: up 2, gate and down 4 bits" in ran.err
    )
    verified = json.loads(run_cli("verify", folder, "--source", str(source), "--json").out)
    assert verified["good"] and {matrix["bits"] for matrix in verified["compared"]} >= {2, 4, 8}
    asked = run_cli("ask", "hi", "-m", folder, "--max-tokens", "3", "--json")
    assert asked.code == 0 and json.loads(asked.out)["new_tokens"] == 3


def test_exact_cannot_be_mixed() -> None:
    with pytest.raises(UsageError, match="16-bit experts"):
        PackSpec(EXACT.up, EXACT.gate, EXACT.down, EXACT.dense, narrow=NARROW)
