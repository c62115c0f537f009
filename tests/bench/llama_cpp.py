"""One full-width Mixtral layer here and in llama.cpp, in turn: prefill of a prompt and decoding of one token.

Run: PEER/bin/pip install llama-cpp-python gguf (an environment of its own), then
.venv/bin/python tests/bench/llama_cpp.py PEER/bin/python FOLDER [--kinds Q4_K Q4_0] [--tokens 128]. FOLDER gets
synthetic GGUF files of one and three layers (3.3 GB per kind); llama.cpp's time per layer is half their difference.
Ours is a `MoELayer` of random weights behind its four attention projections; scores, softmax and norms are left out.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from floe_chat import kernels
from floe_chat.engine.moe import Control, MoELayer
from floe_chat.engine.telemetry import Telemetry
from floe_chat.kernels.layouts import ExpertRows, LinearWeights, RowLayout, UpLayout, UpWeights, VectorLayout
from floe_chat.models.packed import PackedLayer

H, F, EXPERTS, HEADS, KV, VOCABULARY, GROUP = 4096, 14336, 8, 32, 1024, 256, 64
ROUNDS = 4

MAKE = f"""
import sys, numpy as np, gguf
out, layers, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
H, F, E, V, KV = {H}, {F}, {EXPERTS}, {VOCABULARY}, {KV}
T = gguf.GGMLQuantizationType[kind]
block, size = gguf.GGML_QUANT_SIZES[T]
w = gguf.GGUFWriter(out, "llama")
w.add_block_count(layers); w.add_context_length(4096); w.add_embedding_length(H); w.add_feed_forward_length(F)
w.add_head_count({HEADS}); w.add_head_count_kv(8); w.add_layer_norm_rms_eps(1e-5); w.add_rope_freq_base(1e6)
w.add_rope_dimension_count(H // {HEADS}); w.add_expert_count(E); w.add_expert_used_count(2); w.add_vocab_size(V)
w.add_tokenizer_model("no_vocab")
rng = np.random.default_rng(0)
half = np.frombuffer(np.float16(0.002).tobytes(), dtype=np.uint8)
def add(name, *shape):
    blocks = int(np.prod(shape)) // block
    raw = np.tile(rng.integers(0, 256, size=(4096, size), dtype=np.uint8), (-(-blocks // 4096), 1))[:blocks].copy()
    raw[:, 0:2] = half
    if kind == "Q4_K": raw[:, 2:4] = half
    w.add_tensor(name, raw.reshape(*shape[:-1], shape[-1] // block * size), raw_dtype=T)
def plain(name, *shape): w.add_tensor(name, rng.standard_normal(shape, dtype=np.float32) * 0.02)
plain("token_embd.weight", V, H); w.add_tensor("output_norm.weight", np.ones(H, np.float32)); add("output.weight", V, H)
for i in range(layers):
    b = f"blk.{{i}}."
    for norm in ("attn_norm", "ffn_norm"): w.add_tensor(b + norm + ".weight", np.ones(H, np.float32))
    add(b + "attn_q.weight", H, H); add(b + "attn_k.weight", KV, H); add(b + "attn_v.weight", KV, H)
    add(b + "attn_output.weight", H, H); plain(b + "ffn_gate_inp.weight", E, H)
    add(b + "ffn_gate_exps.weight", E, F, H); add(b + "ffn_up_exps.weight", E, F, H)
    add(b + "ffn_down_exps.weight", E, H, F)
w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
"""

TIME = """
import sys, time, json, statistics, numpy as np
from llama_cpp import Llama
tokens, threads, paths = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
models = [Llama(p, n_ctx=512, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
          for p in paths]
prompt = [int(t) for t in np.random.default_rng(1).integers(3, 250, size=tokens)]
def prefill(m):
    m.reset(); start = time.perf_counter(); m.eval(prompt); return time.perf_counter() - start
def decode(m):
    times = []
    for i in range(12):
        start = time.perf_counter(); m.eval([5 + 7 * i]); times.append(time.perf_counter() - start)
    return statistics.median(times)
for line in sys.stdin:
    one, three = [(prefill(m), decode(m)) for m in models]
    print(json.dumps([(three[0] - one[0]) / 2, (three[1] - one[1]) / 2]), flush=True)
"""


class Peer:
    """llama.cpp in a process of its own, so that both take turns within a round."""

    def __init__(self, python: str, folder: Path, kind: str, tokens: int) -> None:
        paths = [str(folder / f"{kind}_{layers}.gguf") for layers in (1, 3)]
        for path, layers in zip(paths, ("1", "3"), strict=True):
            if not Path(path).exists():
                subprocess.run([python, "-c", MAKE, path, layers, kind], check=True)
        command = [python, "-c", TIME, str(tokens), str(torch.get_num_threads()), *paths]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def round(self) -> list[float]:
        """Seconds per layer of a prefill and of a decoded token."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class Ours:
    """Attention projections and experts of one layer."""

    def __init__(self, tokens: int) -> None:
        vector = {bits: VectorLayout(H, bits, GROUP) for bits in (2, 4, 8)}
        rows = RowLayout(vector[4], vector[4], torch.bfloat16)
        data = torch.randint(0, 256, (EXPERTS, F, rows.nbytes), dtype=torch.uint8)
        for start in (0, rows.gate.nbytes):
            head = data[:, :, start : start + 4 * rows.gate.groups].view(torch.float16)
            head[:, :, : rows.gate.groups], head[:, :, rows.gate.groups :] = 0.01, 8
        q = torch.randint(0, 256, (EXPERTS, F, H // 4), dtype=torch.uint8)
        scale = (0.01 + 0.01 * torch.rand(EXPERTS, F, H // GROUP)).half()
        up = UpWeights(UpLayout(vector[2], torch.bfloat16), q, scale, torch.full_like(scale, 1.5))
        self.x, self.weights = torch.randn(tokens, H), torch.rand(tokens, 2)
        self.experts = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(tokens)])
        first = LinearWeights(vector[2], up.q[0], up.scale[0], up.zero[0])
        table = kernels.linear(self.x[:4], first).abs().flatten().quantile(torch.linspace(0, 1, 101))
        self.control = Control(0.0, exact=True)
        layer = PackedLayer(up, ExpertRows(rows, data), table.repeat(EXPERTS, 1))
        self.layer = MoELayer(0, layer, self.control, Telemetry(1, EXPERTS))
        self.attention = {bits: [_linear(vector[bits], n) for n in (H, KV, KV, H)] for bits in (4, 8)}

    def round(self, sparsity: float, exact: bool, bits: int) -> list[float]:
        """Seconds of a prefill, and the median of 12 decoded tokens."""
        self.control.sparsity, self.control.exact = sparsity, exact
        decode = [self._time(slice(i, i + 1), bits) for i in range(12)]
        return [self._time(slice(None), bits), median(decode)]

    def _time(self, tokens: slice, bits: int) -> float:
        x, start = self.x[tokens], time.perf_counter()
        for weights in self.attention[bits]:
            kernels.linear(x, weights, exact=self.control.exact)
        self.layer(x, self.experts[tokens], self.weights[tokens])
        return time.perf_counter() - start


def _linear(vector: VectorLayout, outputs: int) -> LinearWeights:
    q = torch.randint(0, 256, (outputs, H * vector.bits // 8), dtype=torch.uint8)
    scale = torch.full((outputs, H // GROUP), 0.01).half()
    return LinearWeights(vector, q, scale, torch.full_like(scale, 2.0 ** (vector.bits - 1)))


def main() -> None:
    """Print the table, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="the peer's Python")
    parser.add_argument("folder", type=Path, help="where its files are made and kept")
    parser.add_argument("--kinds", nargs="*", default=["Q4_K", "Q4_0"])
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    torch.manual_seed(0)
    ours = Ours(options.tokens)
    settings = {"exact, attention 8 bit": (0.0, True, 8)} | {
        f"{sparsity:.0%} sparse, attention {bits} bit": (sparsity, False, bits)
        for sparsity in (0.6, 0.8)
        for bits in (8, 4)
    }
    found: dict[str, list[list[float]]] = {}
    for kind in options.kinds:
        peer = Peer(options.python, options.folder, kind, options.tokens)
        for turn in range(ROUNDS + 1):
            pair = {f"llama.cpp {kind}": peer.round()} | {n: ours.round(*s) for n, s in settings.items()}
            for name, seconds in pair.items() if turn else ():  # the first round warms up
                found.setdefault(name, []).append(seconds)
        del peer
    rows: list[dict[str, Any]] = []
    for name, rounds in found.items():
        prefill, decode = (median(part) * 1e3 for part in zip(*rounds, strict=True))
        rows.append({"name": name, "prefill_ms": prefill, "decode_ms": decode, "rounds": len(rounds)})
        print(f"{name:32s} prefill of {options.tokens}: {prefill:7.0f} ms   decode: {decode:6.2f} ms per layer")
    print(json.dumps({"bench": "llama_cpp", "threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
