"""Small real models for tests: random weights, published names, a byte-level tokenizer, packed by our packer."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from floe_chat.kernels.operations import fast_type
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.pack.manifest import FILE_NAME, Manifest, file_entry
from floe_chat.models.packing.pack import PackSpec, pack
from floe_chat.models.transformers_import import import_model_code
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] + '\n' }}"
    "{% elif m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)


def write_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> int:
    """One token per byte, and <s>, </s>; returns the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {char: 3 + i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1 << 40,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(vocab)


def make_checkpoint(
    folder: Path,
    *,
    family: str = "mixtral",
    hidden: int = 64,
    intermediate: int = 96,
    experts: int = 4,
    top_k: int = 2,
    layers: int = 2,
    window: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    shards: bool = True,
    seed: int = 0,
) -> Path:
    """A random model as transformers publishes it; weights are wide enough that logits differ from token to token."""
    import_model_code()
    from transformers import MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocab = write_tokenizer(folder)
    heads = next(h for h in (4, 3, 2, 1) if hidden % (2 * h) == 0)
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": window,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "sliding_window": None,
    }
    torch.manual_seed(seed)
    if family == "mixtral":
        model: Any = MixtralForCausalLM(MixtralConfig(num_local_experts=experts, **sizes))
    else:
        model = OlmoeForCausalLM(OlmoeConfig(num_experts=experts, **sizes))
        # OLMoE's router starts at zero, which would leave every choice of experts to ties.
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                torch.nn.init.normal_(parameter, std=0.3)
    model.to(dtype).save_pretrained(folder, max_shard_size="100KB" if shards else "10GB")
    return folder


def calibration_tokens(rows: int = 4, length: int = 32) -> Tensor:
    """Random token ids of the tests' tokenizer."""
    return torch.randint(3, 250, (rows, length), generator=torch.Generator().manual_seed(1))


def make_pack(checkpoint: Path, folder: Path, spec: PackSpec, name: str = "tiny") -> Manifest:
    """Pack a test checkpoint on random tokens; by up, unless a test asks for something else."""
    spec = replace(spec, signal="up") if spec.signal == "auto" else spec
    return pack(Checkpoint(checkpoint), folder, spec, calibration_tokens(), name)


def packing_error() -> float:
    """How far packing's measurements may be from those of float32: some processors compute them in bfloat16."""
    return 1e-2 if fast_type(torch.device("cpu")) == torch.bfloat16 else 1e-4


def relative_rms(got: Tensor, expected: Tensor) -> float:
    """Root of the mean squared error over the root of the mean square of `expected`."""
    error = (got.double() - expected.double()).pow(2).mean().sqrt()
    return float(error / expected.double().pow(2).mean().sqrt().clamp_min(1e-30))


def reference_model(checkpoint: Path) -> Any:
    """transformers' own model of a checkpoint in float32, its experts computed one by one."""
    import_model_code()
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, experts_implementation="eager", local_files_only=True
    )
    if hasattr(model.model, "language_model"):  # it also sees; here it only reads
        weights = {name.replace(".language_model.", "."): tensor for name, tensor in model.state_dict().items()}
        text = model.config.text_config
        model = AutoModelForCausalLM.from_config(text, dtype=torch.float32, experts_implementation="eager")
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model.eval()


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


def run_cli(*arguments: str, stdin: bytes = b"", terminal: bool = False, encoding: str = "utf-8") -> Ran:
    """`floe-chat ARGUMENTS` in this process, through its own entry point, with captured streams."""
    from floe_chat.app.cli.main import main

    out, err = (_Stream(io.BytesIO(), terminal, encoding) for _ in range(2))
    pipe = _Stream(io.BytesIO(stdin), terminal, encoding)
    # An exit that skips the interpreter's own would end the tests too, and call them a success.
    no_exit = mock.patch("os._exit", side_effect=AssertionError("the process was ended"))
    with no_exit, mock.patch.multiple(sys, argv=["floe-chat", *arguments], stdin=pipe, stdout=out, stderr=err):
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int | None), f"the command ended with {code!r}"
    return Ran(code or 0, out.text(), err.text())


class _Stream(io.TextIOWrapper):
    """A standard stream over bytes in memory, which may claim to be a terminal."""

    def __init__(self, content: io.BytesIO, terminal: bool, encoding: str) -> None:
        super().__init__(content, encoding=encoding)
        self._content, self._terminal = content, terminal

    def isatty(self) -> bool:
        return self._terminal

    def text(self) -> str:
        self.flush()
        return self._content.getvalue().decode(self.encoding)


def explained(ran: Ran, code: int) -> str:
    """What a command that failed as it should says: nothing on stdout, and not that the program is at fault."""
    assert (ran.code, ran.out) == (code, ""), ran
    assert ran.err and "Traceback" not in ran.err and "bug in floe-chat" not in ran.err, ran.err
    return ran.err


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON file's content in place; a manifest then is as one of an earlier version, without its checksum."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    change(fields)
    if path.name == FILE_NAME:
        fields.pop("sha256", None)
    path.write_text(json.dumps(fields), encoding="utf-8")


def edit_tensors(folder: Path, change: Callable[[str, Tensor], Tensor | None], files: str = "*.safetensors") -> None:
    """Write safetensors files of `folder` again with what `change` makes of each tensor; None leaves it out."""
    touched = False
    for path in sorted(folder.glob(files)):
        before = load_file(path)
        after = {name: change(name, tensor) for name, tensor in before.items()}
        touched = touched or any(after[name] is not tensor for name, tensor in before.items())
        save_file({name: tensor for name, tensor in after.items() if tensor is not None}, path, {"format": "pt"})
    assert touched, "the edit changed nothing"


def reseal(folder: Path) -> None:
    """Make a pack's manifest agree with its files again, as somebody who crafts one would."""
    entries = {path.name: file_entry(path) for path in folder.iterdir() if path.name != FILE_NAME}

    def change(fields: Any) -> None:
        fields["files"] = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in entries.items()}

    edit_json(folder / FILE_NAME, change)
