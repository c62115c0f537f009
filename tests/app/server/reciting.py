"""Models that recite: each token is followed by one that a test chose, so that a real answer has a known text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from floe_chat.models.packing.pack import EXACT
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from ...helpers import edit_tensors, make_pack
from ...models.chat_families import write_tools

_HIDDEN = 192


def make_reciter(folder: Path, family: str, scripts: Mapping[str, Sequence[str]]) -> Path:
    """A pack with a family's tokenizer and its template for tools.

    Args:
        scripts: what follows a prompt's last token, piece by piece; all pieces differ. The end of the turn comes last.
    """

    from transformers import MixtralConfig, MixtralForCausalLM

    source = folder / "source"
    source.mkdir(parents=True)
    write_tools(source, family)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    known = set(tokenizer.get_vocab())
    new = [piece for script in scripts.values() for piece in script if piece not in known]
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in new])
    tokenizer.save(str(source / "tokenizer.json"))
    kept = {path: path.read_bytes() for path in source.iterdir() if path.name != "config.json"}
    size, end = tokenizer.get_vocab_size(), _end(source)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=size,
        hidden_size=_HIDDEN,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.token_to_id(end),
        sliding_window=None,
    )
    model: Any = MixtralForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(source)
    for path, content in kept.items():
        path.write_bytes(content)
    tokens = torch.sign(torch.randn(size, _HIDDEN))
    follows = torch.zeros(size, _HIDDEN)
    for first, script in scripts.items():
        pieces = [tokenizer.token_to_id(piece) for piece in (first, *script, end)]
        assert None not in pieces
        for before, after in pairwise(pieces):
            follows[after] += tokens[before]

    def change(name: str, tensor: Tensor) -> Tensor | None:
        if "embed_tokens" in name:
            return tokens.to(tensor.dtype)
        if "lm_head" in name:
            return follows.to(tensor.dtype)
        return tensor / 64 if "o_proj" in name or "w2" in name or "down_proj" in name else tensor

    edit_tensors(source, change)
    make_pack(source, folder / "packed", EXACT)
    shutil.rmtree(source)
    return folder / "packed"


def _end(folder: Path) -> str:
    return json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
