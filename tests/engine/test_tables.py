"""Tables on the disk: what is looked up is what transformers' embedding has, whatever the cache; and their files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.machine import hardware
from floe_chat.engine.offload import cards, table_rows
from floe_chat.engine.offload.table_rows import TableRows
from floe_chat.engine.planning.footprint import Footprint
from floe_chat.engine.planning.machine import Described, described, here, of_card
from floe_chat.engine.planning.memory_plan import share_ram
from floe_chat.engine.planning.plan import make
from floe_chat.engine.quality.source_model import SourceModel, identify
from floe_chat.models import catalog, converted
from floe_chat.models.checking.repair import repair
from floe_chat.models.checking.verify import damages
from floe_chat.models.checkpoint import Checkpoint, read_config
from floe_chat.models.errors import CheckpointError, FloeError, PackError
from floe_chat.models.pack.manifest import FILE_NAME, Manifest, file_entry
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.pack.table import ROWS, Table, vector
from floe_chat.models.pack.tensor_file import write_tensors
from floe_chat.models.packing.pack import EXACT, PackSpec, pack
from floe_chat.models.transformers_import import import_model_code
from torch import Tensor

from ..helpers import calibration_tokens, edit_json, edit_tensors, reseal, write_tokenizer
from ..models.test_quantized import broken
from .driver import open_model
from .test_derived import PIECES, agree, config_of, model_of, pieces_of, theirs

FILE = "table_00.safetensors"


def with_tables(folder: Path, **sizes: Any) -> Path:
    """A checkpoint of two layers, whose second one has a table of 2 x 3 heads in 5 parts, unless `sizes` differ."""
    import_model_code()
    small = config_of("qwen4_exp_text").to_dict() | {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "linear_attention"],
        "ple_layer_ids": [2],
        "ple_embed_dim": 54,
        "heads_per_ngram": 3,
        "make_ngram_vocab_size_divisible_by": 5,
        "split_ngram_parts": 5,
    }
    model_of(type(config_of("qwen4_exp_text"))(**small | sizes)).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tables(tmp_path_factory.mktemp("tables") / "source")


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    pack(Checkpoint(source), source.parent / "pack", EXACT, calibration_tokens(), "tiny")
    return source.parent / "pack"


def wanted_of(source: Path, ids: list[int]) -> list[list[Tensor]]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager")
    return theirs(model.eval(), ids)


@pytest.mark.parametrize("columns", [1, 9, 128, 130])
def test_eight_bits_err_little_whatever_the_values(columns: int) -> None:
    values = torch.randn(300, columns) * torch.logspace(-7, 4, 300)[:, None]
    values[7], values[8] = 0, 3.0
    table = Table("t", "t", 300, vector(columns, 4), torch.bfloat16)
    got = table.read(table.stored(values), torch.float32)
    sizes = values.abs().amax(1, keepdim=True)
    assert bool(((got - values).abs() <= sizes / 250 + 2.0**-24).all())
    exact = Table("t", "t", 300, vector(columns, 16), torch.bfloat16)
    assert torch.equal(exact.read(exact.stored(values.bfloat16()), torch.float32), values.bfloat16().float())
    for wrong in (float("nan"), 1e8):
        values[5, 0] = wrong
        with pytest.raises(ValueError, match=r"values that are not finite|too large"):
            table.stored(values)


@pytest.mark.parametrize("cache", [1, 1000, 1 << 20])
def test_a_cache_of_any_size_gives_the_rows_that_are_asked_for(cache: int, tmp_path: Path) -> None:
    rows = torch.randint(0, 256, (777, 37), dtype=torch.uint8)
    write_tensors(tmp_path / "t", {"before": torch.zeros(5), ROWS: rows})
    offset = (tmp_path / "t").read_bytes().index(rows.numpy().tobytes())
    cached, generator = TableRows(rows, tmp_path / "t", offset, cache), torch.Generator().manual_seed(cache)
    for count in (1, 3, 777, 2, 100, 0, 40, 40):
        wanted = torch.randperm(777, generator=generator)[:count].sort().values
        assert torch.equal(cached(wanted), rows[wanted])
        before = cached.read
        assert torch.equal(cached(wanted[:3]), rows[wanted[:3]])
        assert count > 3 or cached.read == before, "what was used last is in RAM"
    assert cached.read == 777 if cache == 1 << 20 else cached.read > 777


def test_logits_are_the_librarys_with_a_cache_that_has_no_room(
    source: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_rows, "CACHE", 1)
    assert "dense.safetensors" in Manifest.read(packed).files and Manifest.read(packed).tables == [FILE]
    assert not any("ngram_embedding" in name for name in PackedModel.open(packed).dense())
    ids = torch.randint(3, 250, (sum(PIECES),), generator=torch.Generator().manual_seed(5)).tolist()
    pieces = wanted_of(source, ids)
    for got, wanted in zip(pieces_of(open_model(packed, "Exact"), ids), pieces, strict=True):
        assert agree(got, *wanted)
    checkpoint = Checkpoint(source)
    identify(checkpoint, PackedModel.open(packed))
    assert agree(SourceModel(checkpoint, lambda _step: None).logits(torch.tensor([ids]), 1)[0, 0], *pieces[-1])


def test_parts_in_eight_bits_share_a_scale(source: Path, tmp_path: Path) -> None:
    """As Qwen3.8-Flash-Next-FP8 publishes its table."""
    copy, wanted = shutil.copytree(source, tmp_path / "copy"), dict[str, Tensor]()
    owner, scale = "model.layers.1.ple.ple_embedding.ngram_embedding", torch.tensor([0.013]).bfloat16()

    def round_off(tensors: dict[str, Tensor]) -> None:
        parts = sorted(name for name in tensors if name.startswith(owner))
        for index, name in enumerate(parts):
            codes = (tensors[name].float() / scale.float()).to(torch.float8_e4m3fn)
            tensors[name], wanted[f"{owner}.{index:05}.weight"] = codes, (codes.float() * scale.float()).bfloat16()
        tensors[f"{owner}.weight_scale"] = scale

    broken(copy, round_off)
    edit_json(copy / "config.json", lambda fields: fields.update(quantization_config={"quant_method": "fp8"}))
    checkpoint = Checkpoint(copy)
    assert checkpoint.tables == {owner: [*wanted]} and len(wanted) == 5
    assert all(torch.equal(checkpoint.tensor(name), values) for name, values in wanted.items())
    broken(copy, lambda tensors: tensors.update({f"{owner}.weight_scale": scale[[0, 0]]}))
    with pytest.raises(CheckpointError, match=r"cannot be packed"):
        Checkpoint(copy)


def test_a_table_is_stored_in_parts_and_repaired(
    source: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converted, "_PIECE", 400)
    tokens, to = calibration_tokens(), tmp_path / "cut"
    checkpoint = Checkpoint(source)
    (parts,) = checkpoint.tables.values()
    assert len(parts) > 15

    class Stopped(Exception):  # noqa: N818 - of this test
        pass

    said = list[str]()

    def stop(step: str, _share: float, _left: float | None) -> None:
        said.append(step)
        if sum("table" in each for each in said) == 9:
            raise Stopped

    with pytest.raises(Stopped):
        pack(checkpoint, to, EXACT, tokens, "tiny", stop)
    read, own = list[str](), Checkpoint.tensor

    def noting(self: Checkpoint, name: str, index: int | None = None) -> Tensor:
        read.append(name)
        return own(self, name, index)

    monkeypatch.setattr(Checkpoint, "tensor", noting)
    pack(Checkpoint(source), to, EXACT, tokens, "tiny")
    assert 0 < len(set(parts) & set(read)) < len(parts), "what was stored is not read again"
    assert (to / FILE).read_bytes() == (packed / FILE).read_bytes()
    spoilt = bytearray((to / FILE).read_bytes())
    spoilt[-100] ^= 1
    (to / FILE).write_bytes(spoilt)
    manifest = Manifest.read(to)
    assert [found.file for found in damages(to, manifest, lambda _step, _share: None)] == [FILE]
    read.clear()
    repair(Checkpoint(source), to, [FILE], tokens, lambda _step, _share, _left: None)
    assert (to / FILE).read_bytes() == (packed / FILE).read_bytes()
    assert set(read) <= {*parts}, "nothing else is packed again"
    assert not damages(to, manifest, lambda _step, _share: None)


def test_files_that_are_cut_or_lie_are_refused_by_name(packed: Path, tmp_path: Path) -> None:
    rows = PackedModel.open(packed)._tensors(FILE)[ROWS]  # pyright: ignore[reportPrivateUsage]

    def refused(change: Callable[[Path], object], *, sealed: bool) -> str:
        to = tmp_path / "pack"
        shutil.copytree(packed, to)
        change(to / FILE)
        if sealed:  # by somebody who wrote the manifest too
            manifest = Manifest.read(to)
            manifest.files[FILE] = file_entry(to / FILE)
            manifest.write(to)
        with pytest.raises(PackError) as error:
            open_model(to, "Exact")
        assert not sealed or FILE in [
            found.file for found in damages(to, Manifest.read(to), lambda _step, _share: None)
        ]
        shutil.rmtree(to)
        return error.value.cause

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-64])

    assert f"{FILE} has" in refused(cut, sealed=False)
    assert f"{FILE} cannot be read" in refused(cut, sealed=True)
    for wrong in (rows[:-1].clone(), rows.view(torch.bfloat16)):
        assert f"{FILE} holds" in refused(partial(write_tensors, tensors={ROWS: wrong}), sealed=True)
    assert f"{FILE} is missing" in refused(Path.unlink, sealed=False)


@pytest.mark.parametrize(
    ("number", "value", "said"),
    [
        ("offsets", 1 << 40, "ask for row 1,099,5"),
        ("offsets", -400, "ask for row -"),
        ("vocab_sizes", 0, "ZeroDivisionError"),
    ],
)
def test_numbers_that_lead_out_of_a_table_are_refused(
    packed: Path, tmp_path: Path, number: str, value: int, said: str
) -> None:
    to = Path(shutil.copytree(packed, tmp_path / "pack"))

    def change(name: str, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, value) if name.endswith(f"ngram_heads_{number}") else tensor

    edit_tensors(to, change, "dense.safetensors")
    reseal(to)
    with pytest.raises(FloeError) as error:
        open_model(to, "Exact")
    assert said in error.value.cause


def test_more_hashes_than_any_model_has_are_refused_at_once(source: Path) -> None:
    fields = read_config(source).to_dict() | {"ngram_size": 8, "heads_per_ngram": 64, "ple_embed_dim": 448}
    with pytest.raises(FloeError, match="in 448 ways; 128 are supported"):
        catalog.described(fields)


def test_a_file_that_shrinks_meanwhile_is_named(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "pack")
    loaded = open_model(tmp_path / "pack", "Exact")
    with (tmp_path / "pack" / FILE).open("r+b") as file:
        file.truncate(200)
    with pytest.raises(FloeError) as error:
        pieces_of(loaded, list(range(5, 5 + sum(PIECES))))
    assert FILE in error.value.title


def test_parts_that_are_no_table_are_refused(source: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    part = next(name for name in tensors if "ngram_embedding.shard_3" in name)
    for changed in (tensors[part][:-1], tensors[part][:, :-1], tensors[part].half()):
        save_file({**tensors, part: changed.contiguous()}, file, {"format": "pt"})
        with pytest.raises(CheckpointError) as error:
            Checkpoint(tmp_path / "source")
        assert "ngram_embedding" in error.value.cause


def test_packs_of_low_width_round_rows_to_eight_bits(source: Path, packed: Path, tmp_path: Path) -> None:
    pack(Checkpoint(source), tmp_path / "low", PackSpec(), calibration_tokens(), "tiny")
    assert Manifest.read(tmp_path / "low").version > Manifest.read(packed).version - 1
    assert (tmp_path / "low" / FILE).stat().st_size < (packed / FILE).stat().st_size
    assert (tmp_path / "low" / FILE_NAME).is_file()
    ids = list(range(5, 5 + sum(PIECES)))
    assert all(bool(logits.isfinite().all()) for logits in pieces_of(open_model(tmp_path / "low", "Balanced"), ids))


def test_plans_count_a_table_as_disk_and_its_cache_as_memory(packed: Path) -> None:
    manifest = Manifest.read(packed)
    takes = Footprint.of_pack(manifest, read_config(packed))
    rows, nbytes = PackedModel.open(packed)._tensors(FILE)[ROWS].shape  # pyright: ignore[reportPrivateUsage]
    assert takes.sizes.tables == ((rows, 9, 6),)
    assert takes.tables == rows * nbytes
    assert takes.dense == pytest.approx(manifest.files["dense.safetensors"].size, rel=0.02, abs=16384)
    used = share_ram(8 << 30, takes, None, 0.0, 64).uses
    assert used["table rows"] == takes.tables, "no more than there is"


@pytest.mark.thorough
def test_the_plan_of_the_whole_model_leaves_its_table_on_the_disk() -> None:
    import_model_code()
    from transformers import Qwen4ExpConfig

    text = {
        "ple_layer_ids": [2],
        "eos_token_id": 2,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }
    entry = catalog.described(Qwen4ExpConfig(text_config=text).to_dict())
    ((rows, columns, looked),) = entry.sizes.tables
    assert rows > 16 * 20_000_000 and (columns, looked) == (128, 16)
    base = of_card(cards.named("4070"), here(hardware.probe(Path()), None))
    machine = described(Described(vram=12 << 30, ram=64 << 30, disk_bytes_s=2e9, disk_free=1 << 40), base)
    found = make(machine, entry)
    chosen = found.chosen
    assert chosen is not None and chosen.in_memory and chosen.place == "pool"
    assert chosen.ram["table rows"] == table_rows.CACHE and sum(chosen.ram.values()) <= 64 << 30
    assert chosen.disk["pack"] > rows * columns
    assert chosen.token.disk < 2e-3
    assert [said for said in found.why if "16 rows" in said]
    slow = make(described(Described(disk_bytes_s=1e8, disk_free=1 << 40), machine), entry).chosen
    assert slow is not None and slow.token.disk > 2e-3
