"""What people type for a model, and the reason why some models cannot be used."""

from __future__ import annotations

import json
import random
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from floe_chat.app.setup.wish import wish
from floe_chat.models import supported, typed_names
from floe_chat.models.catalog import asset, described, find, listed, models_folder, source
from floe_chat.models.errors import FloeError, UsageError
from floe_chat.models.families import FAMILIES
from floe_chat.models.published import PUBLISHED

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

    def test_nothing_is_offered_for_what_is_like_nothing(self) -> None:
        assert (
            typed_names.similar("zzzzzz", ["mixtral-8x7b", "demo"]) is None
            and typed_names.similar("", ["demo"]) is None
        )


class TestReasons:
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen3-VL MoE is not supported yet"),
            ("Llama-4-Scout", "Llama 4 is not supported yet"),
            ("hunyuan:a13b", "Hunyuan MoE is not supported yet"),
            ("MiniMaxAI/MiniMax-M2", "MiniMax is not supported yet"),
            ("deepseek-ai/DeepSeek-V3.1", "DeepSeek-V3.1 is published with 8-bit weights only"),
            ("deepseek r1", "deepseek r1 is published with 8-bit weights only"),
            ("zai-org/GLM-4.5V", "GLM-4.5V is not supported yet"),
            ("ibm-granite/granite-4.0-h-tiny", "Granite 4 is not supported yet"),
            ("google/gemma-4-31B-it", "is not a Mixture-of-Experts model"),
            ("model.gguf", "There is no GGUF file 'model.gguf'"),
            ("~/Downloads/mixtral-8x7b-instruct-v0.1.Q4_K_M.gguf", "There is no GGUF file"),
            ("TheBloke/Mixtral-8x7B-Instruct-v0.1-GGUF", "GGUF files are not downloaded yet"),
            ("TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ", "AWQ cannot be read yet"),
            ("Qwen3-30B-A3B-GPTQ-Int4", "GPTQ cannot be read yet"),
            ("Qwen/Qwen3-30B-A3B-FP8", "Quantized weights cannot be read yet"),
            ("zai-org/GLM-4.5-Air-FP8", "Quantized weights cannot be read yet"),
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
        "text", ["mistralai/Mixtral-8x7B-v0.1", "mlabonne/Beyonder-4x7B-v3", "x/Llama-3-8x8B", "a/olmoe-sft", "my-pack"]
    )
    def test_a_name_that_may_be_one_of_ours_is_not_refused(self, text: str) -> None:
        assert supported.refused(text) is None

    def test_a_converted_copy_names_the_original(self) -> None:
        error = supported.refused("someone/Qwen3-30B-A3B-Instruct-2507-AWQ")
        assert error and error.hint == "Use the original, Qwen/Qwen3-30B-A3B-Instruct-2507."
        assert (other := supported.refused("someone/new.gguf")) and "converted from" in other.hint

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

    def test_every_supported_family_is_named_once_in_one_sentence(self) -> None:
        hint = ((error := supported.refused("dbrx")) and error.hint) or ""
        assert hint.count(" and ") == 1 and hint.count(";") == 1 and hint.endswith("machine.")
        assert all(hint.count(family.called) >= 1 for family in FAMILIES.values())

    def test_what_an_unlisted_repository_is_its_configuration_says(self) -> None:
        """Its owner may call it what they like, so setup asks the hub; only formats are refused by name."""
        assert source("databricks/dbrx-instruct").repo == "databricks/dbrx-instruct"
        with pytest.raises(UsageError, match="GGUF files are not downloaded yet") as caught:
            source("TheBloke/Mixtral-8x7B-v0.1-GGUF")
        assert "works by its path" in caught.value.hint

    def test_an_unlisted_repository_is_left_to_setup(self) -> None:
        with pytest.raises(UsageError) as caught:
            described("https://huggingface.co/someone/New-MoE")
        assert "floe-chat setup someone/New-MoE" in caught.value.hint

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"model_type": "dbrx"}, "DBRX is not supported yet"),
            ({"quantization_config": {"quant_method": "awq"}}, "has AWQ weights, which cannot be read yet"),
            ({"quantization_config": {"quant_method": "a" * 500}}, "…"),
            ({"quantization_config": ["odd"]}, "has quantized weights"),
            ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "has FP8 weights"),
            ({"model_type": "bailing_moe", "auto_map": {"AutoConfig": "a.B"}}, "needs code of its own"),
            ({"model_type": "hunyuan_v1_moe", "auto_map": {"AutoConfig": "a.B"}}, "Hunyuan MoE is not supported"),
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
        fields["quantization_config"] = {"quant_method": "awq"}
        error = supported.refused_type(fields, "openai/gpt-oss-20b-AWQ")
        assert error and "AWQ" in error.title and error.hint == "Use the original, openai/gpt-oss-20b."

    def test_what_can_be_packed_is_what_is_called_supported(self) -> None:
        assert set(supported.SUPPORTED) == set(FAMILIES)


def test_whatever_is_typed_has_an_answer() -> None:
    draw = random.Random(5)
    seeds = [entry.name for entry in PUBLISHED] + [OLMOE, "https://hf.co/a/b", "demo", "qwen3", "x.gguf", "~u/x"]
    for _ in range(100):
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
