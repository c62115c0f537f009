"""Models by name, part, address or folder, what is known of them before they are here, and numbers in words."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import string
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.app.setup.wish import wish
from floe_chat.models import config_limits, quantities, supported, typed_names
from floe_chat.models.catalog import asset, described, find, installed, listed, models_folder, published, source
from floe_chat.models.catalog_entry import Counted, Sizes
from floe_chat.models.checking.verify import damages, unrecorded
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import CheckpointError, FloeError, PackError, UsageError
from floe_chat.models.families import FAMILIES, language_fields
from floe_chat.models.families.derived import configured, derived
from floe_chat.models.families.sizes import sizes_of
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.paths import is_folder_name
from floe_chat.models.published import GGUF, LISTED, PUBLISHED


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
COUNTED = {name for name, fields in CONFIGS.items() if language_fields(fields)["model_type"] not in FAMILIES}
TOTALS = {  # as their makers state them, in billions: parameters, and how many of them a token uses
    "granite-4.0-h-tiny": ("7", "1"),
    "granite-4.0-h-small": ("32", "9"),
    "trinity-nano-preview": ("6.120", "1"),
    "trinity-mini": ("26", "3"),
    "laguna-xs-2.1": ("33", "3"),
    "ling-3.0-flash": ("124", "5.1"),
    "minimax-m2.5": ("229", "10"),
    "kimi-linear-48b-a3b-instruct": ("49.12", "3"),
    "hunyuan-a13b-instruct": ("80", "13"),
}
WEIGHTS = {  # as the hub counts them in their files, with what no pack has
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
    "nemotron-3.5-lightning-30b-a3b": 32_913_266_240,
    "qwen3.8-flash-next": 179_999_981_459,
    "glm-5.3-flash": 321_323_031_390,
}
RENEW = "FLOE_RENEW"
UNLISTED = {"qwen3-next-80b-a3b"}  # how long its layers take in transformers' modules has not been measured


def _stated(part: Sizes | Counted) -> dict[str, Any]:
    """Its fields that are not at their default."""
    return {one.name: value for one in fields(part) if (value := getattr(part, one.name)) != one.default}


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
        # Its index states 31,221,488,576 weights, of which 64 of each layer that has experts take 32 bits.
        assert sizes["glm-4.7-flash"] == 2 * (31_221_488_576 + 64 * 47)
        more = described(CONFIGS["qwen3-next-80b-a3b"]).sizes  # no field of which states the head that its files hold
        head = sum(rows * columns for rows, columns in more.in_draft()) + more.small_of_draft
        head += 3 * more.experts * more.hidden * more.intermediate
        assert more.draft == "experts" and more.parameters + head == 81_324_862_720
        assert round(sizes["lfm2-8b-a1b"] / 1e8) == 167

    @pytest.mark.thorough
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

    @pytest.mark.some(5)
    @pytest.mark.parametrize("name", [name for name in CONFIGS if name not in COUNTED])
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

    @pytest.mark.thorough
    @pytest.mark.parametrize("name", sorted(COUNTED))
    def test_stored_sizes_are_what_is_counted_of_the_published_configuration(self, name: str) -> None:
        """`FLOE_RENEW=1 pytest --all -n0 -k stored_sizes` stores them again."""
        config = configured(language_fields(CONFIGS[name]))
        sizes = sizes_of(derived(config.model_type), config)
        if os.environ.get(RENEW):
            path = asset(LISTED)
            stored = json.loads(path.read_text(encoding="utf-8"))
            assert sizes.counted is not None
            linears = [[*shape, len([*same])] for shape, same in groupby(sizes.counted.linears)]
            counted = _stated(sizes.counted) | {"linears": linears}
            stored[name]["sizes"] = _stated(sizes) | {"counted": counted}
            lines = ",\n".join(f"  {json.dumps(each)}: {json.dumps(entry)}" for each, entry in stored.items())
            path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        else:
            entry = published(name)
            assert entry is not None and entry.sizes == sizes

    def test_what_is_stored_adds_up_to_what_the_makers_state(self) -> None:
        assert TOTALS.keys() | WEIGHTS.keys() == COUNTED
        for name, stated in TOTALS.items():
            entry = published(name)
            assert entry is not None
            for count, figure in zip((entry.sizes.parameters, entry.sizes.active), stated, strict=True):
                assert f"{count / 1e9:.{len(figure.partition('.')[2])}f}" == figure, name
        for name, weights in WEIGHTS.items():
            entry = published(name)
            assert entry is not None and entry.sizes.parameters + entry.unused == weights, name
        ling, laguna, glm = (published(name) for name in ("ling-3.0-flash", "laguna-xs-2.1", "glm-5.3-flash"))
        assert ling is not None and laguna is not None and glm is not None
        assert round((ling.sizes.parameters + ling.unused) / 1e7) == 12749  # with the layer that predicts more tokens
        assert round(laguna.checkpoint_bytes / 1e8) == 669
        assert round(glm.checkpoint_bytes / 1e9) == 328  # mostly of 8 bits

    def test_numbers_for_each_layer_are_limited_like_one(self) -> None:
        assert config_limits.beyond({"moe_topk": [8] * 32, "names": ["a"], "none": []}) is None
        for wrong in ([8, 1 << 40], [8, -1 << 40]):
            assert "is supported" in (config_limits.beyond({"moe_topk": wrong}) or "")
        fields = CONFIGS["hunyuan-a13b-instruct"]
        for wrong in ([3072, 1 << 40], [0, 0], [3072, "a"]):
            with pytest.raises(CheckpointError, match="not supported yet"):
                described({**fields, "moe_intermediate_size": wrong})

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
            assert entry.sizes.parameters < 350e9 and entry.thinks == ("thinks first" in (entry.chat or ""))
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

    @pytest.mark.parametrize("text", ["", "[]", "{", "[" * 10000, "\udcff"])
    def test_a_damaged_configuration(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(CheckpointError):
            described(tmp_path)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", "/", "-rf", ".hidden", "a b", "a\0", "a" * 121, 5]
)
def test_names_that_lead_elsewhere(name: object) -> None:
    assert not is_folder_name(name)


OLMOE = "allenai/OLMoE-1B-7B-0924-Instruct"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def packs(tiny_pack: Path) -> Callable[..., None]:
    def install(*called: str) -> None:
        for name in called:
            shutil.copytree(tiny_pack, models_folder() / name)

    return install


class TestAddresses:
    @pytest.mark.parametrize(
        "text",
        [
            OLMOE,
            f"https://huggingface.co/{OLMOE}",
            f"  https://huggingface.co/{OLMOE}/  ",
            f"https://huggingface.co/{OLMOE}/tree/main",
            f"https://huggingface.co/{OLMOE}/blob/main/config.json",
            f"https://huggingface.co/{OLMOE}?library=transformers#usage",
            f"http://hf-mirror.com/{OLMOE}/resolve/main/model.safetensors",
            f"https://modelscope.cn/models/{OLMOE}",
            f"huggingface.co/{OLMOE}",
            f"hf.co/{OLMOE}",
            f"hf://{OLMOE}",
            f"git@hf.co:{OLMOE}.git",
            f"HTTPS://HuggingFace.co/{OLMOE}.git",
            f"https://example.org/{OLMOE}/discussions",
        ],
    )
    def test_all_mean_the_repository(self, text: str) -> None:
        assert typed_names.hub_repo(text) == typed_names.NamedRepo(OLMOE)
        assert described(text).name == "olmoe-1b-7b-instruct" and source(text).repo == OLMOE
        assert wish(text).name == "olmoe-1b-7b-instruct"

    def test_a_commit_is_taken(self) -> None:
        address = f"https://huggingface.co/{OLMOE}/tree/{COMMIT}"
        assert typed_names.hub_repo(address) == typed_names.NamedRepo(OLMOE, COMMIT) and wish(address).commit == COMMIT

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (f"https://huggingface.co/{OLMOE}/tree/dev", "revision dev"),
            ("https://huggingface.co/datasets/allenai/c4", "data set"),
            ("https://huggingface.co/spaces/some/chat", "a space"),
            ("https://huggingface.co/allenai", "not the address"),
            ("https://", "not the address"),
            ("https://[", "not the address"),
        ],
    )
    def test_other_addresses_are_refused_with_the_reason(self, text: str, reason: str) -> None:
        for resolve in (described, find, source):
            with pytest.raises(UsageError) as caught:
                resolve(text)
            assert reason in str(caught.value) and caught.value.hint

    @pytest.mark.parametrize(
        "text", ["", "mixtral", "a/b/c", "/home/me/model", "./folder", "~/model", "x" * 5000, "../x"]
    )
    def test_what_is_no_repository(self, text: str) -> None:
        assert typed_names.hub_repo(text) is None


class TestParts:
    @pytest.mark.parametrize(
        ("text", "name"),
        [
            ("mixtral", "mixtral-8x7b-instruct"),
            ("Mixtral 8x7B", "mixtral-8x7b"),
            ("mixtral:8x7b", "mixtral-8x7b"),
            ("8x22b", "mixtral-8x22b-instruct"),
            ("olmoe", "olmoe-1b-7b-0125-instruct"),
            ("OLMoE-1B-7B", "olmoe-1b-7b-0125-instruct"),
            ("qwen3", "qwen3-30b-a3b-instruct-2507"),
            ("QWEN3-30B-A3B", "qwen3-30b-a3b"),
            ("qwen3:30b", "qwen3-30b-a3b-instruct-2507"),
            ("qwen3 coder", "qwen3-coder-30b-a3b-instruct"),
            ("qwen3 thinking", "qwen3-30b-a3b-thinking-2507"),
            ("Qwen3-Instruct", "qwen3-30b-a3b-instruct-2507"),
            ("glm 4.5 air", "glm-4.5-air"),
            ("GLM4.7 Flash", "glm-4.7-flash"),
            ("deepseek", "deepseek-v2-lite-chat"),
            ("deepseek v2 lite", "deepseek-v2-lite-chat"),
            ("deepseek coder", "deepseek-coder-v2-lite-instruct"),
            ("phi3.5 moe", "phi-3.5-moe-instruct"),
            ("granite 3b", "granite-3.1-3b-a800m-instruct"),
            ("ernie", "ernie-4.5-21b-a3b"),
        ],
    )
    def test_a_listed_model_by_a_part_of_its_name(self, text: str, name: str) -> None:
        entry = listed(text)
        assert entry is not None and entry.name == name == described(text).name
        assert source(text).entry == entry

    @pytest.mark.parametrize("text", ["qwen3 3b", "qwen3-8b", "instruct qwen3", "glm-4.6", "phi4", "7b qwen3"])
    def test_words_of_another_model_are_no_part(self, text: str) -> None:
        assert listed(text) is None

    def test_an_installed_model_by_a_part_that_only_it_has(self, packs: Callable[..., None]) -> None:
        packs("mixtral-8x7b-instruct", "work-notes")
        assert find("mixtral") == find("MIXTRAL") == models_folder() / "mixtral-8x7b-instruct"
        assert find("notes") == models_folder() / "work-notes" and find("dem") == find("demo")
        assert described("notes").folder == models_folder() / "work-notes"

    def test_the_address_that_it_was_set_up_from(self, packs: Callable[..., None]) -> None:
        packs("olmoe-1b-7b-instruct", "my-mixtral")
        assert find(f"https://hf.co/{OLMOE}") == find(OLMOE) == models_folder() / "olmoe-1b-7b-instruct"
        assert find("someone/My-Mixtral") == models_folder() / "my-mixtral"

    def test_an_id_that_the_hub_does_not_allow_is_explained(self) -> None:
        with pytest.raises(UsageError, match="not known on this machine"):
            described("a-/r")

    @pytest.mark.parametrize("text", ["instruct", "mixtral", "mixtral-8x"])
    def test_a_part_of_several_names_them(self, packs: Callable[..., None], text: str) -> None:
        packs("mixtral-8x7b-instruct", "mixtral-8x22b-instruct")
        with pytest.raises(UsageError, match=r"mixtral-8x22b-instruct or mixtral-8x7b-instruct") as caught:
            find(text)
        assert caught.value.exit_code == 2 and caught.value.hint
        assert find("mixtral-8x7b") == models_folder() / "mixtral-8x7b-instruct"

    def test_a_name_that_was_saved_is_whole(self, packs: Callable[..., None]) -> None:
        packs("mixtral-8x7b-instruct")
        assert find("mixtral-8x7b-instruct", saved=True) == find("mixtral")
        with pytest.raises(UsageError):
            find("mixtral", saved=True)

    def test_a_listed_model_that_is_not_installed_names_the_setup(self) -> None:
        with pytest.raises(UsageError) as caught:
            find("olmoe")
        assert "not set up" in caught.value.title and "floe-chat setup olmoe-1b-7b-0125-instruct" in caught.value.hint

    @pytest.mark.parametrize(("text", "meant"), [("mixtrl", "mixtral"), ("omloe", "olmoe"), ("dmeo", "demo")])
    def test_a_misspelling_is_offered_the_name(self, text: str, meant: str) -> None:
        with pytest.raises(UsageError) as caught:
            described(text)
        assert f"Did you mean {meant}" in caught.value.hint


class TestReasons:
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("Llama-4-Scout", "Llama 4 is not supported yet"),
            ("inclusionAI/Ling-mini-2.0", "Ling is not supported yet"),
            ("google/gemma-4-31B-it", "is not a Mixture-of-Experts model"),
            ("model.gguf", "There is no GGUF file 'model.gguf'"),
            ("~/Downloads/mixtral-8x7b-instruct-v0.1.Q4_K_M.gguf", "There is no GGUF file"),
            ("someone/Mixtral-8x7B-Instruct-v0.1-bnb-4bit", "bitsandbytes cannot be read yet"),
            ("someone/Qwen3-30B-A3B-exl2", "EXL2 cannot be read yet"),
            ("llama3.1", "llama3.1 is not a Mixture-of-Experts model"),
            ("mistralai/Mistral-7B-Instruct-v0.3", "is not a Mixture-of-Experts model"),
            ("Qwen/Qwen3-8B", "is not a Mixture-of-Experts model"),
            ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "is not a Mixture-of-Experts model"),
        ],
    )
    def test_the_name_says_why(self, text: str, reason: str) -> None:
        for resolve in (described, find):
            with pytest.raises(FloeError) as caught:
                resolve(text)
            assert reason in caught.value.title and caught.value.hint and caught.value.exit_code == 2

    @pytest.mark.parametrize(
        "text",
        [
            *("mistralai/Mixtral-8x7B-v0.1", "mlabonne/Beyonder-4x7B-v3", "x/Llama-3-8x8B", "a/olmoe-sft", "my-pack"),
            *(
                "Qwen/Qwen3-VL-30B-A3B-Instruct",
                "hunyuan:a13b",
                "MiniMaxAI/MiniMax-M2",
                "ibm-granite/granite-4.0-h-tiny",
            ),
        ],
    )
    def test_a_name_that_may_be_one_of_ours_is_not_refused(self, text: str) -> None:
        assert supported.refused(text) is None

    def test_a_converted_copy_names_the_original(self) -> None:
        error = supported.refused("someone/Qwen3-30B-A3B-Instruct-2507-exl2")
        assert error and error.hint == "Use the original, Qwen/Qwen3-30B-A3B-Instruct-2507."
        assert (other := supported.refused("someone/new.exl2")) and "converted from" in other.hint

    @pytest.mark.parametrize(
        ("text", "hint"),
        [
            ("glm-4.6", "Other GLM-4.5 models work by hub id (owner/name)."),
            ("Qwen3-235B-A22B", "Other Qwen3 MoE models work by hub id"),
            ("mixtrl", "Did you mean mixtral"),
        ],
    )
    def test_a_model_that_is_not_listed_may_still_work(self, text: str, hint: str) -> None:
        with pytest.raises(UsageError, match="There is no model") as caught:
            described(text)
        assert hint in caught.value.hint

    @pytest.mark.parametrize(
        "text", ["TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ", "zai-org/GLM-4.5-Air-FP8", "deepseek-ai/DeepSeek-V3.1"]
    )
    def test_rounded_copies_are_left_to_setup(self, text: str) -> None:
        assert source(text).repo == text
        with pytest.raises(UsageError) as caught:
            described(text)
        assert f"floe-chat setup {text}" in caught.value.hint

    def test_a_rounded_copy_says_so(self) -> None:
        fields = json.loads(asset("demo", "packed", "config.json").read_text())
        stated = {"quant_method": "gptq", "bits": 4, "group_size": 128}
        entry = described(fields | {"quantization_config": stated})
        assert (entry.rounding, entry.expert_bits) == ("GPTQ, 4 bits", 4 + 20 / 128)
        assert (
            entry.rounded_twice("3/3/8")
            == "Its weights are GPTQ, 4 bits; packed again at 3/3/8 they are rounded twice."
        )
        assert "; packed at 3/4/4, gate and attention keep their codes and the rest is" in entry.rounded_twice("3/4/4")
        assert "; packed at 4/3+4/8, up keeps its codes and the rest is" in entry.rounded_twice("4/3+4/8")
        for other in ({"desc_act": True}, {"group_size": 32}, {"bits": 8}):
            assert described(fields | {"quantization_config": stated | other}).code_bits == 0

    def test_a_makers_smaller_copy_is_named_where_a_model_is_downloaded(self) -> None:
        """Attention is rounded too; embedding, head, routers and norms are not, nor what a model sees with."""
        entry = described("qwen3-30b-a3b")
        assert entry.smaller.endswith("Qwen/Qwen3-30B-A3B-FP8.")
        shown = {"qwen3-30b-a3b": "31.2", "qwen3.6-35b-a3b": "37.4", "glm-4.5-air": "113"}
        shown |= {"nemotron-3-nano-30b-a3b": "32.7", "qwen3.8-flash-next": "185"}
        for name, gigabytes in shown.items():
            assert f"is about {gigabytes} GB" in described(name).smaller, described(name).smaller
        left_out = ["lm_head", "model.layers.0.mlp.gate"]
        stated = {"quant_method": "fp8", "modules_to_not_convert": left_out}
        fields = CONFIGS["qwen3-30b-a3b"] | {"quantization_config": stated}
        assert f"{described(fields).checkpoint_bytes / 1e9:.1f} GB" in entry.smaller
        left_out.append("model.layers.0.self_attn.q_proj")
        assert described(fields).checkpoint_bytes > 32e9
        assert described("mixtral-8x7b").smaller == replace(entry, folder=Path("here")).smaller == ""
        assert all(each.fp8.endswith("-FP8") for each in PUBLISHED if each.fp8)

    @pytest.mark.parametrize(
        ("text", "place", "name"),
        [
            ("someone/New-MoE-GGUF", "someone/New-MoE-GGUF", "new-moe"),
            ("someone/New-MoE-GGUF:Q6_K", "someone/New-MoE-GGUF:Q6_K", "new-moe"),
            ("hf.co/someone/new.gguf:UD-Q4_K_XL", "someone/new.gguf:UD-Q4_K_XL", "new"),
            ("https://hf.co/a/b/blob/main/Q4_0/b-Q4_0.gguf", "a/b:b-Q4_0.gguf", "b"),
            ("Qwen/Qwen3-30B-A3B-GGUF", "Qwen/Qwen3-30B-A3B-GGUF", "qwen3-30b-a3b"),
            ("qwen3-30b-a3b:q6_k", "Qwen/Qwen3-30B-A3B-GGUF:q6_k", "qwen3-30b-a3b"),
            ("Qwen/Qwen3-30B-A3B:q6_k", "Qwen/Qwen3-30B-A3B:q6_k", "qwen3-30b-a3b"),
        ],
    )
    def test_a_gguf_file_of_a_repository(self, text: str, place: str, name: str) -> None:
        found = source(text)
        assert (found.place, found.name) == (place, name)

    def test_gguf_repositories_are_of_listed_models(self) -> None:
        assert {*GGUF} <= {entry.name for entry in PUBLISHED}

    def test_what_an_unlisted_repository_is_its_configuration_says(self) -> None:
        """Its owner may call it what they like, so setup asks the hub; only formats are refused by name."""
        assert source("databricks/dbrx-instruct").repo == "databricks/dbrx-instruct"
        with pytest.raises(UsageError, match="EXL2 cannot be read yet"):
            source("someone/Mixtral-8x7B-v0.1-exl2")

    def test_an_unlisted_repository_is_left_to_setup(self) -> None:
        with pytest.raises(UsageError) as caught:
            described("https://huggingface.co/someone/New-MoE")
        assert "floe-chat setup someone/New-MoE" in caught.value.hint

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"model_type": "dbrx"}, "DBRX is not supported yet"),
            ({"quantization_config": {"quant_method": "hqq"}}, "has HQQ weights, which cannot be read yet"),
            ({"quantization": {"group_size": 64, "bits": 4}}, "has MLX weights"),
            ({"quantization_config": {"quant_method": "a" * 500}}, "…"),
            ({"quantization_config": ["odd"]}, "has quantized weights"),
            ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "has MXFP4 weights"),
            ({"model_type": "bailing_moe", "auto_map": {"AutoConfig": "a.B"}}, "needs code of its own"),
            ({"model_type": "dbrx", "auto_map": {"AutoConfig": "a.B"}}, "DBRX is not supported"),
            ({"model_type": "brand_new", "n_routed_experts": 64}, "'brand_new' is not supported yet"),
            (
                {"model_type": "brand_new", "text_config": {"num_experts": 64}, "num_local_experts": None},
                "not supported",
            ),
            ({"model_type": "llama", "num_local_experts": None}, "not a Mixture-of-Experts model"),
            ({"model_type": None}, "does not describe a model"),
        ],
    )
    def test_a_configuration_says_why(self, changed: dict[str, Any], reason: str) -> None:
        fields = json.loads(asset("demo", "packed", "config.json").read_text())
        with pytest.raises(FloeError) as caught:
            described(fields | changed)
        assert reason in caught.value.title and caught.value.hint

    def test_a_family_that_is_published_quantized_is_read_so_alone(self) -> None:
        fields = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
        assert supported.refused_type(fields, "x/gpt-oss") is None
        fields["quantization_config"] = {"quant_method": "hqq"}
        error = supported.refused_type(fields, "openai/gpt-oss-20b-HQQ")
        assert error and "HQQ" in error.title and error.hint == "Use the original, openai/gpt-oss-20b."

    def test_what_can_be_packed_is_what_is_called_supported(self) -> None:
        assert set(supported.SUPPORTED) == set(FAMILIES)


def test_whatever_is_typed_has_an_answer(every_case: bool) -> None:
    draw = random.Random(5)
    seeds = [entry.name for entry in PUBLISHED] + [OLMOE, "https://hf.co/a/b", "demo", "qwen3", "x.gguf", "~u/x"]
    for _ in range(100 if every_case else 25):
        text = list(draw.choice(seeds))
        for _ in range(draw.randrange(1, 6)):
            text[draw.randrange(len(text)) : draw.randrange(len(text) + 1)] = draw.choice(
                string.printable + "é\ud800\0"
            )
            text = text or ["a"]
        for resolve in (described, find, source):
            try:
                resolve("".join(text))
            except FloeError as error:
                assert error.title and error.hint


@pytest.mark.parametrize(
    ("value", "significant", "text"),
    [
        (0.0065, 2, "0.0065"),
        (0.9996, 3, "1.00"),
        (6.128, 3, "6.13"),
        (61.34, 3, "61.3"),
        (613.4, 3, "613"),
        (950.2, 2, "950"),
        (1296, 2, "1,300"),
        (12345, 3, "12,300"),
        (0, 3, "0"),
        (-0.25, 2, "-0.25"),
        (float("inf"), 3, "—"),
    ],
)
def test_digits(value: float, significant: int, text: str) -> None:
    assert quantities.digits(value, significant) == text


def test_no_number_has_an_exponent() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        value = 10 ** draw.uniform(-9, 15)
        for text in (quantities.digits(value), quantities.digits(value, 2), quantities.duration(value)):
            assert "e" not in text.removesuffix("minutes"), text
        assert float(quantities.digits(value).replace(",", "")) == pytest.approx(value, rel=0.0051)


def test_an_estimate_has_its_range() -> None:
    assert quantities.estimate(563.2, 951.4, 1311.0) == "950 (560 to 1,300)"
    assert quantities.estimate(0.286, 0.6, 0.81) == "0.60 (0.29 to 0.81)"


@pytest.mark.parametrize(
    ("nbytes", "files", "memory"),
    [
        (0, "0 B", "0 MB"),
        (24 << 20, "25.2 MB", "24 MB"),
        (11 << 30, "11.8 GB", "11 GB"),
        (1_600_000_000, "1.60 GB", "1.49 GB"),
        (999_600, "1.00 MB", "0.953 MB"),
    ],
)
def test_files_count_in_thousands_and_memory_as_it_is_sold(nbytes: int, files: str, memory: str) -> None:
    assert (quantities.size(nbytes), quantities.memory(nbytes)) == (files, memory)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.06e-6, "2.06 µs"),
        (0.00888, "8.88 ms"),
        (0.02, "20.0 ms"),
        (0.9999, "1.00 s"),
        (61.2, "61.2 s"),
        (1500, "25 minutes"),
        (10400, "2.9 hours"),
        (270_000, "3.1 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert quantities.duration(seconds) == text


def test_forecasts_are_no_finer_than_a_minute() -> None:
    forecasts = [quantities.forecast(seconds) for seconds in (3, 61, 1500, 10400)]
    assert forecasts == ["1 minute", "about 2 minutes", "about 25 minutes", "about 2.9 hours"]


def test_rates_and_shares() -> None:
    assert quantities.rate(2.32e10) == "23.2 GB/s" and quantities.rate(5.1e8) == "0.51 GB/s"
    assert [quantities.share(part) for part in (0, 0.004, 0.006, 1)] == ["0 %", "<1 %", "1 %", "100 %"]
