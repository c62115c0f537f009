"""Models of families without a record: each type with experts of the installed transformers runs, or says why not.

At 16 bits a pack's logits are those of transformers' own model, in a prompt and token by token. Where the library
itself answers otherwise from its cache than in one pass, what it answers from its cache counts.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from floe_chat.engine.decoder import layers
from floe_chat.engine.decoder.decoders import FusedDecoder, LibraryDecoder, choose
from floe_chat.engine.decoder.kv_cache import KVCache, LibraryStore
from floe_chat.engine.decoder.kv_stores import GrowingStore
from floe_chat.engine.experts.ruled_layer import RuledLayer
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.planning.footprint import Footprint, kv_bytes, kv_element, state_bytes
from floe_chat.engine.planning.speed_estimate import TokenWork
from floe_chat.engine.quality.source_model import SourceModel
from floe_chat.kernels.activation import UNGATED
from floe_chat.kernels.reference import moe_step
from floe_chat.kernels.rule import NEVER
from floe_chat.models import supported
from floe_chat.models.checkpoint import Checkpoint, read_config
from floe_chat.models.errors import CheckpointError, FloeError
from floe_chat.models.families import FAMILIES, Family, family_of
from floe_chat.models.families.derived import derived
from floe_chat.models.families.family import GroupedQuery
from floe_chat.models.families.recognized import recognized
from floe_chat.models.families.sizes import sizes_of
from floe_chat.models.pack.packed_model import PackedLayer, PackedModel
from floe_chat.models.packing.pack import EXACT, PackSpec, pack
from floe_chat.models.transformers_import import import_model_code
from torch import Tensor

from ..helpers import calibration_tokens, relative_rms, write_tokenizer
from ..kernels.oracle import Form, make_layer, make_x
from .driver import a_preset, open_model
from .offloading import EVERYTHING, offloaded

# Small sizes by whatever a configuration calls them.
SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_dense_layers": 1,
    "num_nextn_predict_layers": 0,
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size"), 32),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "sliding_window": 16,
    "dense_intermediate_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
OTHERWISE: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1},
    "bailing_hybrid": {"layer_group_size": 2, "n_group": 1, "num_experts_per_tok": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
        "num_hidden_layers": None,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 32,
    },
    "nemotron_h, latent": {"moe_latent_size": 48},
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp_text": {
        "hc_lowrank": 16,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "heads_per_ngram": 2,
        "split_ngram_parts": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "qwen3_vl_moe_text": {"sliding_window": None},
    "qwen3_omni_moe_text": {"sliding_window": None},
    "glm5_next_text": {"index_kpool": 4, "linear_head_dim": 16, "linear_num_heads": 4, "qk_rope_head_dim": 0},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    },
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [1, 1, 2],
            "partial_rotary_factor": 0.5,
        }
    },
    "mistral4": {  # with rope that scales queries from the tenth token on
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 10,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "deepseek_ocr2_vision": {
        "encoder_config": {
            **dict.fromkeys(("hidden_size", "intermediate_size"), 16),
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "sam_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 16},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", *["sparse"] * 3], "num_key_value_heads": 4},
    "inkling2_vision": {"text_hidden_size": 64},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 4, "adapter_in_dim": 16, "adapter_out_dim": 64},
    "dots3_note_audio_encoder": {"adapter_input_size": 16, "adapter_out_dim": 64},
    "longcat_flash": {"head_dim": 8, "num_layers": 2, "num_hidden_layers": None},
}
READS_WITH = {"mistral3": "mistral4"}  # of models of several kinds, the one that has experts
SEEING = {  # sizes of what a model sees with
    "depth": 1,
    "num_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
RUNS = (
    *("afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v32", "deepseek_v4"),
    *("dots1", "dots3_note_text", "exaone_moe", "flex_olmo", "flint", "glm_moe_dsa", "granitemoe_swa"),
    *("granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling_text", "jamba"),
    *("kimi_linear", "kolibri1", "laguna", "llama4_text", "mellum", "mimo_v2_flash", "minimax", "minimax_m2"),
    *("minimax_m3_vl_text", "mistral4", "nemotron_h", "nemotron_h, latent", "qwen4_exp_text", "solar_open", "zaya"),
    # Models that also see.
    *("aria", "deepseek_ocr2", "dots3_note", "ernie4_5_vl_moe", "glm4v_moe", "glm5_next", "inkling_mm_model", "llama4"),
    *("minimax_m3_vl", "mistral3", "mistral_large4", "qwen3_omni_moe_thinker", "qwen3_vl_moe", "qwen4_exp", "step3p7"),
)
# All of these the fused pass computes; of the others experts alone.
FUSED = {
    *("afmoe", "aria", "aria_text", "deepseek_ocr2", "dots1", "exaone_moe", "flint", "glm4v_moe", "hy_v3", "mellum"),
    *("minimax_m2", "qwen3_omni_moe_thinker", "qwen3_vl_moe", "solar_open"),
}
REFUSED = {  # -> what is said
    "dbrx": "transformers cannot build it",
    "diffusion_gemma": "no model of this type that writes",  # it makes 256 tokens at once out of noise
    "inkling2": "compute something",
    "inkling2_text": "compute something",
    "jetmoe": "called with layer_input",
    "longcat_flash": "identity_expert",
    "muse_spark": "post_expert_norm",
    "unlimited_ocr": "no model of this type that writes",  # it reads pages, and forgets what it wrote but not the page
}
COMPRESSING = ("deepseek_v4",)  # keeps an entry of many tokens, of which plans have an upper limit
LIMIT, KL_LIMIT = 3e-5, 1e-9
PIECES = [40, 1, 1, 3]


def writing() -> set[str]:
    """The model types of the installed transformers that write text and have experts."""
    import_model_code()
    import transformers
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    folder, found = Path(transformers.__file__).parent / "models", set[str]()
    mapping = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    for kind in CONFIG_MAPPING_NAMES.keys() & mapping.keys():
        name = model_type_to_module_name(kind)
        name = name if (folder / name).is_dir() else name.removesuffix("_text")
        code = folder / name / f"modeling_{name}.py"
        if code.is_file() and re.search(r"class \w+Experts\b", code.read_text()):
            found.add(kind)
    return found


def test_every_type_of_the_library_is_known() -> None:
    known = {*FAMILIES, *RUNS, *REFUSED, *(family.within for family in FAMILIES.values())}
    assert writing() - known == set()


def config_of(kind: str) -> Any:
    """A small configuration."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own, _, variant = kind.partition(", ")
    kinds: Any = CONFIG_MAPPING[own]
    parts: dict[str, Any] = getattr(kinds, "sub_configs", {})
    if "text_config" in parts:
        usual = kinds()
        given = {"text_config": config_of(READS_WITH.get(kind) or str(usual.text_config.model_type)).to_dict()}
        for name in parts.keys() - {"text_config"}:
            sees: Any = type(getattr(usual, name))
            fields = sees().to_dict()
            small = {**SMALL, **SEEING, **OTHERWISE.get(sees.model_type, {})}
            given[name] = sees(**{key: value for key, value in small.items() if key in fields}).to_dict()
        tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        given |= {name: 290 + index for index, name in enumerate(tokens)}
        return kinds(**given, tie_word_embeddings=given["text_config"].get("tie_word_embeddings", False))
    fields = kinds().to_dict()
    given = {name: value for name, value in SMALL.items() if name in fields}
    if "kv_lora_rank" in fields:
        given.pop("head_dim", None)
        given["num_key_value_heads"] = 4
    given |= OTHERWISE.get(own, {}) | (OTHERWISE[kind] if variant else {})
    return kinds(**{name: value for name, value in given.items() if value is not None or name == "sliding_window"})


def model_of(config: Any) -> Any:
    """transformers' own, with random weights of 16 bits, in float32."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    seeing: Any = AutoModelForImageTextToText
    auto: Any = AutoModelForCausalLM
    if type(config) not in auto._model_mapping or "text_config" in type(config).sub_configs:
        auto = seeing if type(config) in seeing._model_mapping else AutoModelForMultimodalLM
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    with torch.no_grad():
        for name, own in model.named_parameters():
            around = 1.0 if "norm" in name or name.endswith("scale") else 0.0
            own.copy_(around + 0.15 * torch.randn_like(own))
        for name, own in model.named_buffers():
            if "correction" in name:
                own.copy_(0.1 * torch.randn_like(own))
    return model.to(torch.bfloat16).to(torch.float32)


def published(kind: str, folder: Path) -> Any:
    """The model, and a checkpoint of it."""
    import_model_code()
    model = model_of(config_of(kind))
    folder.mkdir()
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


def theirs(model: Any, ids: list[int]) -> list[list[Tensor]]:
    """What transformers' logits after each piece are, by its cache. After the last one, with which some models go on
    otherwise, also token by token, and after all in one pass.
    """
    found, cache, kept, singly, start = list[list[Tensor]](), None, None, torch.empty(0), 0
    with torch.inference_mode():
        for piece in PIECES:
            some = torch.tensor([ids[start : start + piece]])
            kept = copy.deepcopy(cache)
            out = model(input_ids=some, past_key_values=cache, use_cache=True)
            cache, start = out.past_key_values, start + piece
            found.append([out.logits[0, -1]])
        for token in ids[-PIECES[-1] :]:
            one = model(input_ids=torch.tensor([[token]]), past_key_values=kept, use_cache=True)
            kept, singly = one.past_key_values, one.logits[0, -1]
        whole = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        return [*found[:-1], [*found[-1], singly, whole]]


def cached_as_planned(loaded: LoadedModel, kv: KVCache, tokens: int) -> bool:
    """Whether plans count what a text has cached."""
    manifest, store = loaded.packed.manifest, kv.store
    sizes = sizes_of(manifest.family, read_config(loaded.packed.folder))
    planned = kv_bytes(sizes, 16, kv_element(manifest.widths.dense, sizes))
    if isinstance(store, GrowingStore):
        return store.nbytes() == planned.of(store.capacity)
    assert isinstance(store, LibraryStore)
    most = 3 if manifest.architecture.model_type in COMPRESSING else 1
    return store.nbytes() <= planned.seen(tokens) + state_bytes(sizes) <= most * store.nbytes()


def pieces_of(loaded: LoadedModel, ids: list[int]) -> list[Tensor]:
    """Logits after each piece."""
    kv, found, start = KVCache(), list[Tensor](), 0
    for piece in PIECES:
        some = ids[start : start + piece]
        found.append(loaded.decoder.forward(some, kv)[0])
        kv.computed(some, loaded.control.preset)
        start += piece
    assert cached_as_planned(loaded, kv, start)
    return found


def agree(got: Tensor, *wanted: Tensor) -> bool:
    """Whether logits are one of these."""
    for each in wanted:
        kl = F.kl_div(got.double().log_softmax(-1), each.double().log_softmax(-1), log_target=True, reduction="sum")
        if relative_rms(got, each) <= LIMIT and float(kl) <= KL_LIMIT:
            return True
    return False


@pytest.mark.some(4)
@pytest.mark.parametrize("kind", RUNS)
def test_a_pack_answers_as_the_librarys_model_does(kind: str, tmp_path: Path) -> None:
    model = published(kind, tmp_path / "source")
    ids = torch.randint(3, 250, (sum(PIECES),), generator=torch.Generator().manual_seed(5)).tolist()
    pack(Checkpoint(tmp_path / "source"), tmp_path / "exact", EXACT, calibration_tokens(), "tiny")
    loaded = open_model(tmp_path / "exact", "Exact")
    for index, (got, wanted) in enumerate(zip(pieces_of(loaded, ids), theirs(model, ids), strict=True)):
        assert agree(got, *wanted), (kind, index)
    assert isinstance(loaded.decoder, FusedDecoder) == (kind in FUSED), loaded.decoder.reason
    counted = sizes_of(family_of(loaded.model.config.model_type), loaded.model.config).counted
    assert counted is not None
    assert (not counted.library) == (kind in FUSED), "plans say the same"
    pack(Checkpoint(tmp_path / "source"), tmp_path / "low", PackSpec(), calibration_tokens(), "tiny")
    assert all(bool(logits.isfinite().all()) for logits in pieces_of(open_model(tmp_path / "low", "Balanced"), ids))
    packed = PackedModel.open(tmp_path / "low")
    takes = Footprint.of_pack(packed.manifest, loaded.model.config)
    layers = [packed.layer(index) for index in range(packed.manifest.architecture.layers)]
    assert takes.ups == sum(layer.signal.nbytes for layer in layers)
    assert takes.rows == sum(layer.rows.data.nbytes for layer in layers)
    assert any(name.endswith("_proj.q") for name in packed.dense()), "linear layers are codes"


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["exaone_moe", "qwen4_exp", "zaya", "nemotron_h, latent"])
def test_where_rows_are_changes_no_answer(kind: str, tmp_path: Path) -> None:
    published(kind, tmp_path / "source")
    pack(Checkpoint(tmp_path / "source"), tmp_path / "exact", EXACT, calibration_tokens(), "tiny")
    loaded, ids = open_model(tmp_path / "exact", "Exact"), list(range(5, 5 + sum(PIECES)))
    wanted = pieces_of(loaded, ids)
    for share in (0.05, 1.0):
        with offloaded(loaded, EVERYTHING, share):
            assert all(map(agree, pieces_of(loaded, ids), wanted))


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["nemotron_h", "minimax_m2", "zaya"])
def test_a_source_answers_as_the_librarys_model_does(kind: str, tmp_path: Path) -> None:
    model, ids = published(kind, tmp_path / "source"), torch.arange(5, 45)[None]
    with torch.inference_mode():
        wanted = model(input_ids=ids, use_cache=False).logits[0, -1]
    assert agree(SourceModel(Checkpoint(tmp_path / "source"), lambda _step: None).logits(ids, 1)[0, -1], wanted)


def wrongly(record: Family, part: str) -> Family:
    """A record that is not the model's."""
    attention: Any = record.attention
    if part == "window":
        return replace(record, attention=replace(attention, window=GroupedQuery().window))
    if part == "rope":
        return replace(record, attention=replace(attention, turned=GroupedQuery().turned))
    if part == "router":
        return replace(record, routing=replace(record.routing, scale=1.0))
    return replace(record, scaled="routed_scaling_factor")


@pytest.mark.parametrize("part", ["window", "rope", "router", "embedding"])
def test_a_record_that_is_not_the_models_is_not_used(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import_model_code()
    config = config_of("exaone_moe")
    assert isinstance(choose(model_of(config), 256), FusedDecoder)

    def record(whole: Any) -> Family:
        return wrongly(recognized(whole), part)

    monkeypatch.setattr(layers, "recognized", record)
    declined = choose(model_of(config), 256)
    assert isinstance(declined, LibraryDecoder)
    assert "computes otherwise" in declined.reason
    assert config.sliding_window == SMALL["sliding_window"]


def test_without_a_gate_nothing_is_done_for_what_is_zero_and_both_shares_are_one() -> None:
    made, tables = make_layer((3, 96, 64, 64), (4, 4, 4), Form("up", "relu2")), torch.linspace(0, 2, 101).repeat(3, 1)
    tables[:, :50], tables[2] = 0, NEVER
    layer, x = PackedLayer(made.stored, made.rows, tables, tables), make_x(5, 64, torch.float32)
    index, weights = torch.randint(3, (5, 2), generator=torch.Generator().manual_seed(1)), torch.rand(5, 2)
    v = torch.relu(torch.einsum("bh,bkfh->bkf", x.double(), made.signal[index])).square()

    everything = RuledLayer(layer, EVERYTHING, 0).work(index, weights)
    y, counts = moe_step(x, made.stored, made.rows, everything.calls, everything.thresholds)
    assert relative_rms(y, torch.einsum("bk,bkf,bkfh->bh", weights.double(), v, made.down[index])) <= 1e-5
    expected = torch.where(index == 2, 96, (v > 0).sum(-1))
    assert counts[:, 0].tolist() == expected.flatten().tolist()

    assert derived("nemotron_h", UNGATED).signals == ("up",)
    for sparsity, product in ((0.6, 0.8), (0.8, 0.6)):
        preset = a_preset("Both", sparsity, product)
        found = RuledLayer(layer, preset, 0).limits
        assert found.product is None
        assert found.signal.tolist() == pytest.approx([1.6, 1.6, NEVER])
        work = TokenWork.of(preset, gated=False)
        assert (work.active, work.reached) == (pytest.approx(0.2), 1)


@pytest.mark.some(2)
@pytest.mark.parametrize(("kind", "said"), REFUSED.items())
def test_what_differs_is_refused_by_name(kind: str, said: str, tmp_path: Path) -> None:
    import_model_code()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config: Any = CONFIG_MAPPING[kind]() if kind == "dbrx" else config_of(kind)
    error = supported.refused_type(config.to_dict(), "It")
    assert error is not None
    assert said in error.cause


def test_experts_of_which_some_compute_otherwise_are_refused() -> None:
    import_model_code()
    fields = config_of("step3p7").to_dict()
    fields["text_config"]["swiglu_limits"] = [0, 0, 0, 7]  # as published, in the last layers
    error = supported.refused_type(fields, "It")
    assert error is not None
    assert "Step3p7Experts" in error.cause


def test_an_interrupted_pack_continues_with_the_same_bytes(tmp_path: Path) -> None:
    published("minimax_m2", tmp_path / "source")
    spec, tokens = PackSpec(), calibration_tokens()
    pack(Checkpoint(tmp_path / "source"), tmp_path / "whole", spec, tokens, "tiny")

    class Stopped(Exception):  # noqa: N818 - of this test
        pass

    def stop(step: str, share: float, _left: float | None) -> None:
        if share > 0.6:
            raise Stopped

    with pytest.raises(Stopped):
        pack(Checkpoint(tmp_path / "source"), tmp_path / "cut", spec, tokens, "tiny", stop)
    pack(Checkpoint(tmp_path / "source"), tmp_path / "cut", spec, tokens, "tiny")
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "cut" / path.name).read_bytes(), path.name


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    published("dots1", tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    expert = "model.layers.2.mlp.experts.3.up_proj.weight"
    assert expert in tensors

    def refused(changed: Mapping[str, Tensor]) -> str:
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, file, {"format": "pt"})
        with pytest.raises(FloeError) as error:
            pack(Checkpoint(tmp_path / "source"), tmp_path / "pack", EXACT, calibration_tokens(), "tiny")
        shutil.rmtree(tmp_path / "pack", ignore_errors=True)
        return f"{error.value.title} {error.value.cause}"

    assert "layers.2.mlp.experts" in refused({name: part for name, part in tensors.items() if name != expert})
    assert "layers.2.mlp.experts" in refused({**tensors, expert: tensors[expert][:-1]})
    assert "layers.2.mlp.experts" in refused({**tensors, expert: tensors[expert].float()})
    assert "self_attn.q_proj" in refused({n: part for n, part in tensors.items() if "1.self_attn.q_proj" not in n})


def test_a_configuration_out_of_all_bounds_is_refused() -> None:
    import_model_code()
    fields = config_of("minimax_m2").to_dict()
    for name, value in (("num_hidden_layers", 10**6), ("num_local_experts", 10**6), ("num_mtp_modules", 1 << 40)):
        error = supported.refused_type({**fields, name: value}, "It")
        assert isinstance(error, CheckpointError)
        assert name in error.cause or "experts" in error.cause
    assert supported.refused_type({**fields, "hidden_act": "relu"}, "It") is not None
    assert not isinstance(supported.refused_type(fields, "It"), CheckpointError)
