"""llama.cpp beside the engine, with modules that stand in for llama-cpp-python and gguf in its process."""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from floe_chat.engine.bench.peer import llama
from floe_chat.engine.bench.peer.recipes import PeerSizes, Recipe
from floe_chat.engine.bench.synthetic import MODELS, Spec, usual_layers
from floe_chat.models.errors import FloeError, UsageError

MIXTRAL = PeerSizes("llama", MODELS["mixtral-8x7b"])
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "vocab_size": 96,
    "sliding_window": None,
    "model_type": "mixtral",
}
SMALL = PeerSizes.of(SimpleNamespace(**SIZES))


def peer_of(name: str) -> PeerSizes:
    return PeerSizes.of(Spec(name, usual_layers(name)).config())


FAKE_LLAMA = """
import json
__version__ = "9.9.9"
class Llama:
    def __init__(self, path, n_ctx, n_batch, n_ubatch, n_threads, n_threads_batch, use_mmap, verbose):
        assert n_threads == n_threads_batch and n_ctx >= 40
        self.header = json.load(open(path))
    def reset(self): self.seen = 0
    def eval(self, ids):
        assert all(0 <= token < self.header["vocab_size"] for token in ids)
        self.seen += len(ids)
        if self.seen == 66: raise SystemExit(3)
"""
FAKE_GGUF = """
import json
class GGMLQuantizationType:
    __class_getitem__ = classmethod(lambda cls, name: name)
GGML_QUANT_SIZES = {"Q4_0": (32, 18), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}
GGML_QUANT_SIZES |= {"Q5_0": (32, 22), "Q5_1": (32, 24), "MXFP4": (32, 17)}
class GGUFWriter:
    def __init__(self, path, arch): self.path, self.header, self.tensors = path, {"arch": arch}, {}
    def __getattr__(self, name):
        assert name.startswith("add_"), name
        return lambda *value: self.header.__setitem__(value[0] if value[1:] else name[4:], value[-1])
    def add_tensor(self, name, data, raw_dtype="F32"): self.tensors[name] = [raw_dtype, data.nbytes, list(data.shape)]
    def write_header_to_file(self): pass
    def write_kv_data_to_file(self): pass
    def write_tensors_to_file(self): json.dump(self.header | {"tensors": self.tensors}, open(self.path, "w"))
    def close(self): pass
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter whose llama_cpp and gguf only keep count; returns a folder for files."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "llama_cpp.py").write_text(FAKE_LLAMA)
    (modules / "gguf.py").write_text(FAKE_GGUF)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    return tmp_path / "files"


def silent(_what: str, _done: int, _total: int) -> None:
    """Nobody watches."""


def test_sizes_are_those_of_published_files() -> None:
    def whole_file(kind: str, widths: PeerSizes, layers: int) -> float:
        """Bytes of a model of so many layers, by the two sizes that are made."""
        one, three = (Recipe(kind, widths, count).nbytes() for count in (1, 3))
        return one + (layers - 1) * (three - one) / 2

    # TheBloke's Mixtral-8x7B Q4_0, bartowski's Mixtral-8x22B Q4_K_M.
    assert whole_file("Q4_0", MIXTRAL, 32) == pytest.approx(26.44e9, rel=1e-3)
    sizes = replace(MIXTRAL.sizes, hidden=6144, intermediate=16384, heads=48, vocab=32768)
    assert whole_file("Q4_K_M", PeerSizes("llama", sizes), 56) == pytest.approx(85.58e9, rel=2e-3)
    assert llama.memory_bytes(MIXTRAL) == pytest.approx(7.4e9, rel=0.01)
    # unsloth's Qwen3-30B-A3B Q4_K_M, ggml-org's gpt-oss-20b.
    for name, kind, size in (("qwen3-30b-a3b", "Q4_K_M", 18.56e9), ("gpt-oss-20b", "MXFP4_MOE", 12.11e9)):
        widths = peer_of(name)
        assert widths.files[-1] == kind
        assert whole_file(kind, widths, MODELS[name].layers) == pytest.approx(size, rel=2e-3)


PARTS = {
    "gpt-oss-20b": {
        "attn_sinks.weight": ((64,), "F32"),
        "ffn_up_exps.bias": ((32, 2880), "F32"),
        "ffn_down_exps.weight": ((32, 2880, 2880), "MXFP4"),
    },
    "deepseek-v2-lite": {  # 256 divides neither 1,408 nor 128
        "attn_v.weight": None,
        "ffn_down_exps.weight": ((64, 2048, 1408), "Q5_0"),
        "ffn_down_shexp.weight": ((2048, 2816), "Q4_K"),
        "attn_k_b.weight": ((16, 512, 128), "Q5_0"),
    },
    "qwen3.6-35b-a3b": {
        "attn_q.weight": ((8192, 2048), "Q4_K"),
        "ssm_beta.weight": None,
        "ffn_gate_inp_shexp.weight": ((2048,), "F32"),
    },
    "qwen3-next-80b-a3b": {"attn_q_norm.weight": ((256,), "F32"), "post_attention_norm.weight": ((2048,), "F32")},
    "gemma-4-26b-a4b": {
        "attn_q.weight": ((8192, 2816), "Q4_K"),
        "attn_k.weight": ((1024, 2816), "Q4_K"),
        "attn_v.weight": None,
        "ffn_gate_up_exps.weight": ((128, 1408, 2816), "Q4_K"),
        "ffn_down_exps.weight": ((128, 2816, 704), "Q5_0"),  # 256 does not divide 704
        "ffn_down_exps.scale": ((128,), "F32"),
        "ffn_down.weight": ((2816, 2112), "Q5_0"),
    },
    "lfm2-8b-a1b": {"exp_probs_b.bias": ((32,), "F32"), "shortconv.conv.weight": None},
    "phi-3.5-moe": {"attn_norm.bias": ((4096,), "F32"), "attn_k.bias": ((1024,), "F32")},
    "glm-4.7-flash": {
        "attn_q_b.weight": ((5120, 768), "Q4_K"),
        "attn_k_b.weight": ((20, 512, 192), "Q5_0"),
        "exp_probs_b.bias": ((64,), "F32"),
        "ffn_up_shexp.weight": ((1536, 2048), "Q4_K"),
    },
}
OTHERS = {  # of the second layer, which is of another kind than the first
    "gpt-oss-20b": {},
    "deepseek-v2-lite": {
        "ffn_down_exps.weight": ((64, 2048, 1408), "Q8_0"),
        "ffn_down_shexp.weight": ((2048, 2816), "Q6_K"),
    },
    "qwen3.6-35b-a3b": {
        "attn_q.weight": None,
        "attn_qkv.weight": ((8192, 2048), "Q6_K"),
        "attn_gate.weight": ((4096, 2048), "Q4_K"),
        "ssm_alpha.weight": ((32, 2048), "Q4_K"),
        "ssm_conv1d.weight": ((8192, 4), "F32"),
        "ssm_dt.bias": ((32,), "F32"),
        "ssm_a": ((32,), "F32"),
        "ssm_out.weight": ((2048, 4096), "Q4_K"),
    },
    "qwen3-next-80b-a3b": {"ssm_ba.weight": ((64, 2048), "Q4_K"), "ssm_norm.weight": ((128,), "F32")},
    "gemma-4-26b-a4b": {
        "attn_q.weight": ((4096, 2816), "Q4_K"),
        "attn_v.weight": ((2048, 2816), "Q6_K"),
        "attn_k_norm.weight": ((256,), "F32"),
    },
    "lfm2-8b-a1b": {"shortconv.conv.weight": ((2048, 3), "F32"), "shortconv.in_proj.weight": ((6144, 2048), "Q4_K")},
    "phi-3.5-moe": {},
    "glm-4.7-flash": {},
}
HEADERS: dict[str, dict[str, object]] = {
    "gpt-oss-20b": {"head_count_kv": 8, "key_length": 64, "value_length": 64},
    "deepseek-v2-lite": {
        "head_count_kv": 1,
        "key_length": 576,
        "key_length_mla": 192,
        "value_length": 512,
        "value_length_mla": 128,
        "rope_dimension_count": 64,
        "expert_shared_count": 2,
        "kv_lora_rank": 512,
    },
    "qwen3.6-35b-a3b": {"attention.recurrent_layers": [False, True, True, True, False], "ssm_group_count": 16},
    "qwen3-next-80b-a3b": {"expert_used_count": 10, "ssm_inner_size": 4096, "expert_shared_feed_forward_length": 512},
    "gemma-4-26b-a4b": {
        "head_count_kv": [2, 8, 8, 8, 8],
        "sliding_window_pattern": [False, True, True, True, True],
        "rope_dimension_count": 512,
        "rope_dimension_count_swa": 256,
        "feed_forward_length": 2112,
    },
    "lfm2-8b-a1b": {"head_count_kv": [8, 0, 0, 0, 8], "shortconv_l_cache": 3, "expert_gating_func": 2},
    "phi-3.5-moe": {"expert_feed_forward_length": 6400, "rope_dimension_count": 128},
    "glm-4.7-flash": {"q_lora_rank": 768, "key_length_mla": 256, "expert_gating_func": 2, "expert_weights_norm": True},
}


@pytest.mark.parametrize("name", PARTS)
def test_files_of_several_kinds_of_layers(name: str) -> None:
    widths = peer_of(name)
    tensors = Recipe(widths.files[-1], widths, 5).tensors()
    for layer, wanted in enumerate((PARTS[name], OTHERS[name])):
        assert {part: tensors.get(f"blk.{layer}.{part}") for part in wanted} == wanted
    tied = widths.sizes.tied
    embedding = "Q8_0" if name == "gpt-oss-20b" else "Q6_K" if tied else "Q4_K"
    assert ("output.weight" in tensors) != tied and tensors["token_embd.weight"][1] == embedding
    assert ("rope_freqs.weight" in tensors) == (name == "gemma-4-26b-a4b")
    header = widths.header(5)
    assert {key: header[key] for key in HEADERS[name]} == HEADERS[name]
    few, many = widths.layers
    assert widths.kinds == () or sorted(map(widths.kind, range(few, many))) == sorted(widths.kinds)
    small = Recipe("Q4_K_M", widths, few)
    assert (small.nbytes() == small.read_bytes(all_experts=True)) == tied


def test_a_token_reads_the_experts_it_chose_and_a_prompt_all() -> None:
    one, three = (Recipe("Q4_0", MIXTRAL, layers) for layers in MIXTRAL.layers)
    token, prompt = (three.read_bytes(all_experts=every) - one.read_bytes(all_experts=every) for every in (False, True))
    experts = 2 * 8 * 3 * 4096 * 14336 * 18 // 32
    assert prompt - token == pytest.approx(experts * 6 / 8, abs=2) and prompt == three.nbytes() - one.nbytes()


def test_files_are_made_once_and_answers_are_timed(fakes: Path) -> None:
    said: list[str] = []
    with llama.running(sys.executable, SMALL, fakes, 2, 32, lambda what, _done, _total: said.append(what)) as peers:
        assert [one.name for one in peers] == [f"llama.cpp {kind}" for kind in SMALL.files]
        for one in peers:
            for layers in one.layers:
                prompt, token = one.answer(32, 8, layers)
                assert prompt > 0 and token > 0
                assert one.answer(32, 0, layers)[1] == 0
        # The system may count a process' time in whole ticks only.
        give_up = time.monotonic() + 60
        while not any(one.cpu_seconds() for one in peers) and time.monotonic() < give_up:
            peers[0].answer(32, 8, SMALL.layers[0])
        assert sum(one.cpu_seconds() for one in peers) > 0
    files = sorted(fakes.iterdir())
    assert len(files) == 4 and any("Making" in line and str(fakes) in line for line in said)
    for kind in SMALL.files:
        for layers in SMALL.layers:
            recipe = Recipe(kind, SMALL, layers)
            made: dict[str, Any] = json.loads(recipe.file(fakes).read_text())
            assert (made["arch"], made["block_count"], made["expert_count"], made["vocab_size"]) == (
                "llama",
                layers,
                8,
                96,
            )
            assert {name: kind for name, (kind, _, _) in made["tensors"].items()} == {
                name: kind for name, (_, kind) in recipe.tensors().items()
            }
            assert sum(nbytes for _, nbytes, _ in made["tensors"].values()) == recipe.nbytes()
    stamps = [file.stat().st_mtime_ns for file in files]
    with llama.running(sys.executable, SMALL, fakes, 2, 32, silent):
        assert [file.stat().st_mtime_ns for file in files] == stamps


def test_a_peer_that_stops_is_explained(fakes: Path) -> None:
    with llama.running(sys.executable, SMALL, fakes, 2, 32, silent) as peers, pytest.raises(FloeError) as caught:
        peers[0].answer(66, 1, 1)
    assert "llama.cpp stopped" in caught.value.title and "3" in caught.value.cause


@pytest.mark.parametrize("python", ["/nonesuch/python", sys.executable], ids=["absent", "without llama_cpp"])
def test_an_interpreter_without_llama_cpp_is_a_usage_error(python: str) -> None:
    with pytest.raises(UsageError, match="cannot") as caught:
        llama.version_of(python)
    assert caught.value.cause and "pip install llama-cpp-python gguf" in caught.value.hint


def test_files_that_do_not_fit_are_refused_before_any_is_made(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(_folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=10**9)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with (
        pytest.raises(FloeError, match=r"take 7\.4 GB") as caught,
        llama.running(sys.executable, MIXTRAL, fakes, 2, 9, silent),
    ):
        pass
    assert "1.0 GB are free" in caught.value.cause and "--peer-files" in caught.value.hint
    assert not list(fakes.iterdir())


def test_a_folder_that_cannot_be_made_is_explained(fakes: Path) -> None:
    fakes.write_text("a file")
    with pytest.raises(FloeError, match="cannot be used"), llama.running(sys.executable, SMALL, fakes, 2, 9, silent):
        pass


def test_a_file_that_cannot_be_made_leaves_nothing(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fakes.parent / "modules" / "gguf.py").write_text(FAKE_GGUF + "\nraise RuntimeError('no disk')\n")
    monkeypatch.setattr(llama, "version_of", str)
    with (
        pytest.raises(FloeError, match="cannot be made") as caught,
        llama.running(sys.executable, SMALL, fakes, 2, 9, silent),
    ):
        pass
    assert "no disk" in caught.value.cause and not list(fakes.iterdir())


@pytest.mark.parametrize(
    "changed", [{"model_type": "olmoe"}, {"hidden_size": 272}, {"intermediate_size": 400}], ids=str
)
def test_other_models_cannot_be_compared(changed: dict[str, Any]) -> None:
    config = SimpleNamespace(**(SIZES | changed))
    assert not PeerSizes.possible(config)
    with pytest.raises(UsageError, match=r"no llama\.cpp model"):
        PeerSizes.of(config)
