"""Finding a model by name or folder, and what is known of one before it is here."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.models.catalog import asset, described, find, installed, models_folder, published
from floe_chat.models.catalog_entry import Sizes
from floe_chat.models.checking.verify import damages, unrecorded
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import CheckpointError, PackError, UsageError
from floe_chat.models.families import FAMILIES, language_fields
from floe_chat.models.families.sizes import sizes_of
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.paths import is_folder_name
from floe_chat.models.published import PUBLISHED


@pytest.fixture
def named(tiny_pack: Path) -> str:
    """A pack in the user's models folder."""
    models_folder().mkdir(parents=True)
    shutil.copytree(tiny_pack, models_folder() / "mine")
    return "mine"


def test_a_name_means_a_folder_of_the_models_folder(named: str) -> None:
    assert find(named) == models_folder() / "mine"


@pytest.mark.parametrize("form", ["absolute", "relative", "trailing-slash"])
def test_a_path_means_itself(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.chdir(tiny_pack.parent)
    given = {"absolute": str(tiny_pack), "relative": f"./{tiny_pack.name}", "trailing-slash": f"{tiny_pack}/"}[form]
    assert find(given).resolve() == tiny_pack.resolve()


def test_the_home_sign_is_understood(tiny_pack: Path, own_folders: Path) -> None:
    shutil.copytree(tiny_pack, own_folders / "p")
    assert find("~/p").resolve() == (own_folders / "p").resolve()


def test_a_name_goes_before_a_folder_in_the_current_directory(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / named).mkdir()
    monkeypatch.chdir(tmp_path)
    assert find(named) == models_folder() / "mine"


@pytest.mark.parametrize(
    "name",
    ["nonesuch", "no/such/folder", "~nosuchuser/pack", "x" * 5000, "x/" * 3000, "a\0b", "../../..nonesuch", "-"],
    ids=lambda name: ascii(name)[:20],
)
def test_what_is_not_there_is_explained(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(name)
    assert "demo" in caught.value.cause and caught.value.hint and caught.value.exit_code == 2


def test_a_checkpoint_is_told_from_a_pack(tiny_checkpoint: Path) -> None:
    with pytest.raises(PackError, match="not packed"):
        find(str(tiny_checkpoint))


def test_installed_lists_good_and_bad(named: str) -> None:
    (models_folder() / "broken").mkdir()
    (models_folder() / "broken" / "manifest.json").write_text("{")
    (models_folder() / "a file").write_text("not a model")
    found = {model.name: model for model in installed()}
    assert set(found) == {"demo", "mine", "broken"}
    assert found[named].trouble is None and found[named].bytes > 100_000
    assert found["broken"].trouble


def test_the_demo_is_whole() -> None:
    pack = find("demo")
    assert damages(pack, Manifest.read(pack), lambda _step, _share: None) == []
    assert unrecorded(pack, Manifest.read(pack)) == []


CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8")
)
UNLISTED = {"qwen3-next-80b-a3b"}  # how long its layers take in transformers' modules has not been measured


def _predicting(sizes: Sizes, fields: dict[str, Any]) -> int:
    """Weights of the layers that predict several tokens: attention and experts each, and what joins their inputs."""
    hidden = sizes.hidden
    attention = sum(rows * columns for rows, columns in sizes.projections()) + sizes.head_norms
    router = (sizes.experts + sizes.shared_gate) * hidden
    experts = 3 * hidden * (sizes.experts * sizes.intermediate + sizes.shared)
    layers: int = fields.get("mtp_num_hidden_layers", 0)
    return layers * (attention + router + experts + 2 * hidden) + bool(layers) * (2 * hidden + 3) * hidden


class TestDescribed:
    def test_listed_models_have_their_published_sizes(self) -> None:
        """Bytes as the published indexes state them (total_size)."""
        sizes = {entry.name: entry.checkpoint_bytes for entry in PUBLISHED}
        assert sizes["mixtral-8x7b-instruct"] == sizes["mixtral-8x7b"] == 93_405_585_408
        assert sizes["mixtral-8x22b-instruct"] == 281_260_142_592
        assert sizes["olmoe-1b-7b-instruct"] == 13_838_323_712
        assert sizes["qwen3-30b-a3b"] == 61_064_245_248
        assert sizes["qwen1.5-moe-a2.7b-chat"] == 28_631_568_384
        assert sizes["deepseek-v2-lite-chat"] == 31_412_968_448
        assert sizes["phi-3.5-moe-instruct"] == 83_746_306_688
        assert round(sizes["lfm2-8b-a1b"] / 1e8) == 167

    def test_a_download_counts_what_a_model_sees_with(self) -> None:
        """To a tenth of a gigabyte, as the hub shows it; a pack has none of it."""

        from transformers import AutoConfig, AutoModelForImageTextToText

        for name, shown in (("qwen3.5-35b-a3b", 719), ("qwen3.6-35b-a3b", 719), ("gemma-4-26b-a4b-it", 516)):
            entry = published(name)
            assert entry is not None and round(entry.checkpoint_bytes / 1e8) == shown
            left = entry.checkpoint_bytes // 2 - entry.sizes.parameters
            fields = CONFIGS[name]
            with torch.device("meta"):
                module = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**fields))
            seeing = sum(
                tensor.numel() for part, tensor in module.named_parameters() if "vision" in part or "visual" in part
            )
            assert seeing == left - _predicting(entry.sizes, fields["text_config"])

    @pytest.mark.parametrize("name", CONFIGS)
    def test_their_sizes_are_those_of_the_published_configuration(self, name: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = CONFIGS[name]
        entry = published(name) or described(fields)
        assert described(fields).sizes == entry.sizes
        kind = str(language_fields(fields)["model_type"])
        FAMILIES[kind].register()
        config = AutoConfig.for_model(**fields)
        config = config if config.model_type == kind else config.text_config
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
        precise = "e_score_correction_bias", "expert_bias"  # of 32 bits; a buffer of most, and a parameter of one
        weights = sum(tensor.numel() for name, tensor in module.named_parameters() if not name.endswith(precise))
        biases = sum(tensor.numel() for name, tensor in module.state_dict().items() if name.endswith(precise))
        assert entry.sizes.parameters == weights + 2 * biases
        assert sizes_of(FAMILIES[config.model_type], config) == entry.sizes

    def test_layers_that_see_a_window_are_those_of_transformers_defaults(self) -> None:
        fields = CONFIGS["gpt-oss-20b"]
        left_out = {name: value for name, value in fields.items() if name not in ("layer_types", "sliding_window")}
        assert described(left_out).sizes == described(fields).sizes and described(fields).sizes.windowed == 12
        for kinds in (["full_attention"], 7):
            with pytest.raises(CheckpointError, match="does not describe a model"):
                described(fields | {"layer_types": kinds})

    def test_the_smallest_that_can_chat_is_listed_first(self) -> None:
        first, *others = (entry for entry in PUBLISHED if entry.chat)
        assert first.name == "granite-3.1-1b-a400m-instruct" and first.gated is False
        assert all(other.sizes.parameters > first.sizes.parameters for other in others)
        assert [entry.chat is None for entry in PUBLISHED] == sorted(entry.chat is None for entry in PUBLISHED)
        names = [entry.name for entry in PUBLISHED]
        assert names.index("olmoe-1b-7b-0125-instruct") < names.index("olmoe-1b-7b-instruct")
        assert names.index("qwen3-30b-a3b-instruct-2507") < names.index("qwen3-coder-30b-a3b-instruct")

    def test_entries_are_complete_and_differ(self) -> None:
        """A person reads licence and terms before a download, and ranking needs the date."""
        for entry in PUBLISHED:
            assert entry.licence and entry.gated is not None and re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", entry.released)
            assert entry.sizes.parameters < 150e9 and entry.thinks == ("thinks first" in (entry.chat or ""))
            assert entry.repo and entry.name == entry.name.lower()
        for field in ("name", "repo"):
            assert len({getattr(entry, field) for entry in PUBLISHED}) == len(PUBLISHED)
        assert [entry.name for entry in PUBLISHED if entry.gated] == [
            "mixtral-8x7b-instruct",
            "mixtral-8x22b-instruct",
            "mixtral-8x7b",
        ]
        assert set(CONFIGS) == {entry.name for entry in PUBLISHED} | UNLISTED

    def test_every_family_has_a_listed_model(self) -> None:
        """Except one, whose published models have 8-bit weights or no tokenizer.json, and those of UNLISTED."""
        without = {str(language_fields(CONFIGS[name])["model_type"]) for name in UNLISTED} | {"deepseek_v3"}
        assert FAMILIES.keys() - {entry.sizes.model_type for entry in PUBLISHED} == without

    @pytest.mark.parametrize("name", ["mixtral-8x7b", "MIXTRAL-8X7B", "mistralai/Mixtral-8x7B-v0.1"])
    def test_a_name_or_hub_id_in_any_case(self, name: str) -> None:
        entry = described(name)
        assert entry == published(name) and entry.licence == "Apache-2.0" and entry.gated is True
        assert entry.chat is None and described("mixtral-8x7b-instruct").chat

    def test_a_checkpoint_has_as_many_weights_as_its_description(self, tiny_checkpoint: Path) -> None:
        entry = described(tiny_checkpoint)
        source = Checkpoint(tiny_checkpoint)
        weights = sum(source.tensor(name).numel() for name in source.dense_names())
        weights += sum(part.numel() for layer in range(2) for e in range(4) for part in source.expert(layer, e))
        assert entry.sizes.experts == 4 and entry.sizes.layers == 2 and entry.sizes.parameters == weights
        assert (entry.folder, entry.packed, entry.repo) == (tiny_checkpoint, False, None)

    def test_packs_are_described_too(self, named: str) -> None:
        demo, mine = described("demo"), described(named)
        assert demo.packed and demo.sizes.hidden == 256 and demo.licence and demo.gated is False
        assert mine.packed and mine.folder == models_folder() / named and mine.licence == "" and mine.gated is None

    def test_a_hub_id_is_known_by_its_cached_configuration(self, own_folders: Path, tiny_checkpoint: Path) -> None:
        commit = "1" * 40
        folder = own_folders / ".cache/huggingface/hub/models--some--Model"
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)
        shutil.copy(tiny_checkpoint / "config.json", folder / "snapshots" / commit)
        from huggingface_hub import constants

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "HF_HUB_CACHE", str(folder.parent))
            entry = described("some/Model")
        assert (entry.name, entry.repo, entry.sizes.layers) == ("model", "some/Model", 2)

    @pytest.mark.parametrize("name", ["nonesuch", "a/b/c", "", "x" * 5000, "a\0b", "~nosuchuser/x", "-"])
    def test_what_nobody_knows_is_explained(self, name: str) -> None:
        with pytest.raises(UsageError) as caught:
            described(name)
        assert "mixtral-8x7b-instruct" in caught.value.cause and caught.value.hint

    def test_fields_of_a_configuration_will_do(self) -> None:
        fields = json.loads(asset("demo", "packed", "config.json").read_text())
        assert described(fields).sizes == described("demo").sizes
        del fields["num_key_value_heads"], fields["head_dim"], fields["max_position_embeddings"]
        sizes = described(fields).sizes
        assert (sizes.kv_heads, sizes.head_dim, sizes.window) == (8, 32, 131072)

    @pytest.mark.parametrize(
        "changed",
        [
            {"model_type": "llama"},
            {"model_type": None},
            {"model_type": ["mixtral"]},
            {"hidden_size": 0},
            {"hidden_size": "many"},
            {"hidden_size": 1 << 60},
            {"num_local_experts": -1},
            {"num_local_experts": None},
            {"num_experts_per_tok": 9},
            {"vocab_size": True},
            {"num_hidden_layers": 2.5},
        ],
        ids=str,
    )
    def test_configurations_that_make_no_sense(self, changed: dict[str, Any]) -> None:
        fields = json.loads(asset("demo", "packed", "config.json").read_text())
        with pytest.raises(CheckpointError) as caught:
            described(fields | changed)
        if changed.get("model_type") is not None and isinstance(changed["model_type"], str):
            assert "Mixtral, OLMoE, " in caught.value.hint

    @pytest.mark.parametrize("text", ["", "[]", "{", "[" * 10000, "\udcff"])
    def test_a_damaged_configuration(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(CheckpointError):
            described(tmp_path)


@pytest.mark.parametrize("name", ["tiny", "mixtral-8x7b_3.4", "größer", "a" * 120])
def test_names_of_folders(name: str) -> None:
    assert is_folder_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", "/", "-rf", ".hidden", "a b", "a\0", "a" * 121, 5]
)
def test_names_that_lead_elsewhere(name: object) -> None:
    assert not is_folder_name(name)
