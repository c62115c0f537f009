"""llama.cpp beside the engine, with modules that stand in for llama-cpp-python and gguf in its process."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from floe_chat.engine.bench.peer import llama
from floe_chat.engine.bench.peer.recipes import LAYERS, PeerSizes, Recipe
from floe_chat.engine.bench.synthetic import MODELS, Spec
from floe_chat.models.errors import FloeError, UsageError


def mixtral(*sizes: int) -> PeerSizes:
    """Hidden size, neurons, heads, heads of keys, size of a head, vocabulary, experts, experts of a token."""
    return PeerSizes("llama", *sizes, rope=sizes[4], value=sizes[4])


MIXTRAL = mixtral(4096, 14336, 32, 8, 128, 32000, 8, 2)
SMALL = mixtral(256, 512, 4, 2, 64, 96, 8, 2)
FAKE_LLAMA = """
import json
__version__ = "9.9.9"
class Llama:
    def __init__(self, path, n_ctx, n_batch, n_ubatch, n_threads, n_threads_batch, verbose):
        assert n_threads == n_threads_batch and n_ctx >= 40
        self.told = json.load(open(path))
    def reset(self): self.seen = 0
    def eval(self, ids):
        assert all(0 <= token < self.told["vocab_size"] for token in ids)
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
    def __init__(self, path, arch): self.path, self.told, self.tensors = path, {"arch": arch}, {}
    def __getattr__(self, name):
        assert name.startswith("add_"), name
        return lambda value: self.told.__setitem__(name[4:], value)
    def add_tensor(self, name, data, raw_dtype="F32"): self.tensors[name] = [raw_dtype, data.nbytes, list(data.shape)]
    def write_header_to_file(self): pass
    def write_kv_data_to_file(self): pass
    def write_tensors_to_file(self): json.dump(self.told | {"tensors": self.tensors}, open(self.path, "w"))
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


def test_recipes_are_those_of_llama_cpp_for_eight_experts() -> None:
    tensors = Recipe("Q4_K_M", MIXTRAL, 3).tensors()
    kinds = {name: kind for name, (_, kind) in tensors.items()}
    for layer, down in enumerate(("Q4_K", "Q6_K", "Q4_K")):
        parts = {"attn_q": "Q4_K", "attn_k": "Q8_0", "attn_v": "Q8_0", "attn_output": "Q5_K", "ffn_gate_exps": "Q4_K"}
        parts |= {"ffn_up_exps": "Q4_K", "ffn_down_exps": down, "ffn_gate_inp": "F32", "attn_norm": "F32"}
        assert all(kinds[f"blk.{layer}.{part}.weight"] == kind for part, kind in parts.items())
    assert (kinds["output.weight"], kinds["token_embd.weight"]) == ("Q6_K", "Q4_K")
    assert tensors["blk.0.ffn_down_exps.weight"][0] == (8, 4096, 14336)
    assert tensors["blk.0.attn_k.weight"][0] == (1024, 4096)
    plain = {kind for _, kind in Recipe("Q4_0", MIXTRAL, 3).tensors().values()}
    assert plain == {"Q4_0", "Q8_0", "Q6_K", "F32"}


def whole_file(kind: str, widths: PeerSizes, layers: int) -> float:
    """Bytes of a model of so many layers, by the two sizes that are made."""
    one, three = (Recipe(kind, widths, count).nbytes() for count in LAYERS)
    return one + (layers - 1) * (three - one) / 2


def test_sizes_are_those_of_published_files() -> None:
    # TheBloke's Mixtral-8x7B Q4_0, bartowski's Mixtral-8x22B Q4_K_M.
    assert whole_file("Q4_0", MIXTRAL, 32) == pytest.approx(26.44e9, rel=1e-3)
    assert whole_file("Q4_K_M", mixtral(6144, 16384, 48, 8, 128, 32768, 8, 2), 56) == pytest.approx(85.58e9, rel=2e-3)
    assert llama.memory_bytes(MIXTRAL) == pytest.approx(7.4e9, rel=0.01)
    # unsloth's Qwen3-30B-A3B Q4_K_M, ggml-org's gpt-oss-20b.
    for name, kind, size in (("qwen3-30b-a3b", "Q4_K_M", 18.56e9), ("gpt-oss-20b", "MXFP4_MOE", 12.11e9)):
        widths = PeerSizes.of(Spec(name, 3).config())
        assert widths.kinds[-1] == kind
        assert whole_file(kind, widths, MODELS[name].layers) == pytest.approx(size, rel=2e-3)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_recipes_of_other_families(name: str) -> None:
    widths = PeerSizes.of(Spec(name, 3).config())
    kinds = {name: kind for name, (_, kind) in Recipe(widths.kinds[-1], widths, 3).tensors().items()}
    parts = ("attn_q", "attn_v", "ffn_gate_exps", "ffn_down_exps", "ffn_down_shexp", "attn_k_b", "attn_sinks")
    found = [[kinds.get(f"blk.{layer}.{part}.weight") for part in parts] for layer in (0, 1)]
    assert kinds["output.weight"] == ("Q8_0" if name == "gpt-oss-20b" else "Q6_K")
    assert (
        found
        == {
            "qwen3-30b-a3b": [
                ["Q4_K", "Q4_K", "Q4_K", "Q4_K", None, None, None],
                ["Q4_K", "Q6_K", "Q4_K", "Q6_K", None, None, None],
            ],
            "gpt-oss-20b": 2 * [["Q8_0", "Q8_0", "MXFP4", "MXFP4", None, None, "F32"]],
            "deepseek-v2-lite": [  # 256 divides neither 1,408 nor 128
                ["Q4_K", None, "Q4_K", "Q5_0", "Q4_K", "Q5_0", None],
                ["Q4_K", None, "Q4_K", "Q8_0", "Q6_K", "Q5_0", None],
            ],
        }[name]
    )
    assert kinds.get("blk.1.ffn_up_exps.bias") == ("F32" if name == "gpt-oss-20b" else None)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_headers_hold_what_the_architecture_asks_for(name: str) -> None:
    told = PeerSizes.of(Spec(name, 3).config()).told()
    if name == "deepseek-v2-lite":
        assert (told["head_count_kv"], told["key_length"], told["key_length_mla"]) == (1, 576, 192)
        assert (told["value_length"], told["value_length_mla"], told["rope_dimension_count"]) == (512, 128, 64)
        assert (told["expert_shared_count"], told["kv_lora_rank"]) == (2, 512)
    else:
        heads = {"qwen3-30b-a3b": (4, 128, 128), "gpt-oss-20b": (8, 64, 64)}[name]
        assert (told["head_count_kv"], told["key_length"], told["value_length"]) == heads


def test_a_token_reads_the_experts_it_chose_and_a_prompt_all() -> None:
    one, three = (Recipe("Q4_0", MIXTRAL, layers) for layers in LAYERS)
    token, prompt = (three.read_bytes(all_experts=every) - one.read_bytes(all_experts=every) for every in (False, True))
    experts = 2 * 8 * 3 * 4096 * 14336 * 18 // 32
    assert prompt - token == pytest.approx(experts * 6 / 8, abs=2) and prompt == three.nbytes() - one.nbytes()


def test_files_are_made_once_and_answers_are_timed(fakes: Path) -> None:
    told: list[str] = []
    with llama.running(sys.executable, SMALL, fakes, 2, 32, lambda what, _done, _total: told.append(what)) as peers:
        assert [one.name for one in peers] == [f"llama.cpp {kind}" for kind in SMALL.kinds]
        for one in peers:
            for layers in one.layers:
                prompt, token = one.answer(32, 8, layers)
                assert prompt > 0 and token > 0
                assert one.answer(32, 0, layers)[1] == 0
        # The system may count a process' time in whole ticks only.
        give_up = time.monotonic() + 60
        while not any(one.cpu_seconds() for one in peers) and time.monotonic() < give_up:
            peers[0].answer(32, 8, LAYERS[0])
        assert sum(one.cpu_seconds() for one in peers) > 0
    files = sorted(fakes.iterdir())
    assert len(files) == 4 and any("Making" in line and str(fakes) in line for line in told)
    for kind in SMALL.kinds:
        for layers in LAYERS:
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
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 96}
    sizes |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 8, "model_type": "mixtral"}
    assert PeerSizes.of(SimpleNamespace(**sizes)) == SMALL
    config = SimpleNamespace(**(sizes | changed))
    assert not PeerSizes.possible(config)
    with pytest.raises(UsageError, match=r"no llama\.cpp model"):
        PeerSizes.of(config)
