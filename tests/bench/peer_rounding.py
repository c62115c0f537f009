"""What llama.cpp's Q4_K_M costs on a checkpoint: the mean KL divergence from it, as `floe-chat eval` measures a pack's.

    python tests/bench/peer_rounding.py CHECKPOINT TEXT --library SITE-PACKAGES/llama_cpp/lib/libggml-base.so

Each matrix has the type that llama-quant.cpp gives it without an importance matrix: where 256 does not divide a row,
the wider type that it falls back to. ggml itself quantizes; transformers computes, in float32.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import shutil
import tempfile
from pathlib import Path

import torch
from floe_chat.engine.bench.peer.recipes import BLOCKS
from floe_chat.models.packing.calibration import read_tokens
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

TYPES = {"Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}  # ggml.h: enum ggml_type
NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # tensor_type_fallback
WINDOW = 512  # tokens, the second half of which are predicted
KEPT = ("norm", "block_sparse_moe.gate.", "mlp.gate.weight", "e_score_correction")  # in float32


def more_bits(layer: int, layers: int) -> bool:
    """use_more_bits of llama-quant.cpp."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def type_of(name: str, columns: int, layers: int, experts: int) -> str:
    """The type of a matrix in a file of kind Q4_K_M."""
    found = re.search(r"layers\.(\d+)\.", name)
    more = found is not None and more_bits(int(found[1]), layers)
    kind = "Q4_K"
    if name.startswith("lm_head") or (more and re.search(r"v_proj|down_proj|\.w2\.", name)):
        kind = "Q6_K"
    if experts == 8 and re.search(r"[kv]_proj", name):
        kind = "Q8_0"
    elif experts == 8 and "o_proj" in name:
        kind = "Q5_K"
    return NARROW.get(kind, kind) if columns % BLOCKS[kind][0] else kind


class Ggml:
    """ggml's own quantization."""

    def __init__(self, library: Path) -> None:
        for beside in sorted(library.parent.glob("libggml-base*")):
            ctypes.CDLL(str(beside), ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(library))
        self._library.ggml_quantize_chunk.restype = ctypes.c_size_t

    def rounded(self, matrix: Tensor, kind: str) -> Tensor:
        """(rows, columns) as its type keeps it."""
        values = matrix.float().contiguous()
        rows, columns = values.shape
        per_block, size = BLOCKS[kind]
        stored = torch.empty(rows * columns // per_block * size, dtype=torch.uint8)
        pointers = [ctypes.c_void_p(part.data_ptr()) for part in (values, stored)]
        sizes = [ctypes.c_int64(number) for number in (0, rows, columns)]
        written = self._library.ggml_quantize_chunk(TYPES[kind], *pointers, *sizes, None)
        assert written == stored.numel(), (written, stored.numel())
        out = torch.empty_like(values)
        convert = self._library[f"dequantize_row_{kind.lower().replace('_k', '_K')}"]
        convert(pointers[1], ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(values.numel()))
        return out


def rounded(checkpoint: Path, folder: Path, ggml: Ggml) -> float:
    """Write the checkpoint that Q4_K_M keeps; returns the bits per weight of its experts."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    experts = config.get("num_local_experts") or config.get("n_routed_experts") or config["num_experts"]
    bits, count = 0.0, 0
    for path in sorted(checkpoint.iterdir()):
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
            continue
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        for name, tensor in tensors.items():
            if tensor.ndim != 2 or any(part in name for part in KEPT):
                continue
            kind = type_of(name, tensor.shape[1], config["num_hidden_layers"], experts)
            tensors[name] = ggml.rounded(tensor, kind)
            if re.search(r"experts\.\d", name):
                bits += tensor.numel() * 8 * BLOCKS[kind][1] / BLOCKS[kind][0]
                count += tensor.numel()
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    return bits / count


@torch.inference_mode()
def logits(checkpoint: Path, windows: Tensor) -> Tensor:
    """What the model predicts for the second half of each window."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return torch.cat([model(window[None]).logits[0, WINDOW // 2 - 1 : -1] for window in windows])


def main() -> None:
    """Measure, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=4)
    given = parser.parse_args()
    ids = read_tokens(given.checkpoint, given.text.read_text(encoding="utf-8")).flatten()
    windows = ids[: given.windows * WINDOW].view(-1, WINDOW)
    with tempfile.TemporaryDirectory() as folder:
        bits = rounded(given.checkpoint, Path(folder), Ggml(given.library))
        mine, theirs = (logits(path, windows).log_softmax(-1) for path in (given.checkpoint, Path(folder)))
    divergence = (mine.exp() * (mine - theirs)).sum(-1)
    print(f"KL {divergence.mean():.4f} nats over {len(divergence)} tokens; experts at {bits:.2f} bits per weight")


if __name__ == "__main__":
    main()
