"""Tensors out of a published checkpoint: one map of names per model family, shards opened one tensor at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Family:
    """How one model family names its experts on disk, and where transformers keeps the rest in memory.

    Attributes:
        expert: published name of one expert matrix, with fields {layer}, {expert} and {part}.
        gate, up, down: what {part} is for each. renames: published fragment -> fragment of the module's name.
        linears: how the names end of the linear layers that a pack may store at low width, on disk and in memory.
    """

    model_type: str
    expert: str
    gate: str
    up: str
    down: str
    renames: tuple[tuple[str, str], ...] = ()
    linears: tuple[str, ...] = (".q_proj", ".k_proj", ".v_proj", ".o_proj", "lm_head")

    def module_name(self, published: str) -> str:
        """The name in transformers' module of a dense tensor's published name; the only place that renames."""
        for old, new in self.renames:
            published = published.replace(old, new)
        return published

    def is_linear(self, layer: str) -> bool:
        """Whether a layer's name, on disk or in memory, is that of an attention projection or the head."""
        return layer.endswith(self.linears)


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="mixtral",
            expert="model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight",
            gate="w1",
            up="w3",
            down="w2",
            renames=((".block_sparse_moe.", ".mlp."),),
        ),
        Family(
            model_type="olmoe",
            expert="model.layers.{layer}.mlp.experts.{expert}.{part}.weight",
            gate="gate_proj",
            up="up_proj",
            down="down_proj",
        ),
    )
}


def read_config(folder: Path) -> PretrainedConfig:
    """The transformers configuration in `folder`; no code of the checkpoint's own is ever run.

    Raises:
        CheckpointError: no config.json, one that cannot be read, or a model that is no MoE of a family in FAMILIES.
    """
    path = folder / "config.json"
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        model_type = fields.get("model_type")
    except FileNotFoundError:
        raise CheckpointError(
            f"There is no checkpoint at {folder}",
            "It has no config.json." if folder.is_dir() else "The folder does not exist.",
            "Give the folder that holds config.json and the *.safetensors files of a downloaded model.",
        ) from None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read", str(error), "Download the checkpoint again.") from error
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(
            f"The checkpoint at {folder} cannot be packed",
            f"Its model type is {model_type!r}, which is not a Mixture-of-Experts model that floe-chat knows.",
            f"Use a checkpoint of one of these types: {known}.",
        )
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        _check_config(config)
    # Each of transformers' configurations raises what it likes, down to ZeroDivisionError.
    except Exception as error:
        raise CheckpointError(f"{path} does not describe a model", str(error), "Download it again.") from error
    return config


def _check_config(config: Any) -> None:
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    sizes = (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads)
    if min(*sizes, experts, config.num_experts_per_tok) < 1 or config.num_experts_per_tok > experts:
        raise ValueError("its sizes make no sense")
    if config.hidden_act != "silu":
        raise ValueError(f"its experts use {config.hidden_act!r}; floe-chat computes silu")


class Checkpoint:
    """A folder of safetensors shards with config.json, as published.

    Attributes:
        config: transformers' configuration. family: its names. float16: float16 or bfloat16, what 16-bit widths store.
        exact: False when the weights are wider than 16 bit, so that 16-bit widths round them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: Any = read_config(folder)
        self.family = FAMILIES[self.config.model_type]
        self._where, self._stored = _index(folder)
        self._check()
        dtypes = {self._stored[name][0] for name in self._every_expert_name()}
        self.exact = len(dtypes) == 1 and dtypes <= {"BF16", "F16"}
        self.float16 = torch.float16 if self.exact and dtypes == {"F16"} else torch.bfloat16

    @property
    def experts(self) -> int:
        config = self.config
        return int(getattr(config, "num_local_experts", None) or config.num_experts)

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate (F, H), up (F, H) and down (H, F) of one expert, in the checkpoint's dtype."""
        gate, up, down = (self.tensor(name) for name in self._expert_names(layer, expert))
        return gate, up, down

    def dense_names(self) -> list[str]:
        """Published names of everything that is not an expert."""
        experts = {
            name
            for layer in range(self.config.num_hidden_layers)
            for expert in range(self.experts)
            for name in self._expert_names(layer, expert)
        }
        return [name for name in self._where if name not in experts]

    def tensor(self, name: str) -> Tensor:
        """One tensor by its published name.

        Raises:
            CheckpointError: the shard that should hold it is missing or damaged.
        """
        try:
            with safe_open(self._where[name], "pt") as shard:
                return shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self._where[name].name} of the checkpoint cannot be read",
                str(error),
                "Download that file again.",
            ) from error

    def _expert_names(self, layer: int, expert: int) -> list[str]:
        f = self.family
        return [f.expert.format(layer=layer, expert=expert, part=part) for part in (f.gate, f.up, f.down)]

    def _every_expert_name(self) -> list[str]:
        layers, experts = range(self.config.num_hidden_layers), range(self.experts)
        return [name for layer in layers for expert in experts for name in self._expert_names(layer, expert)]

    def _check(self) -> None:
        layers = self.config.num_hidden_layers
        beyond = (self._expert_names(layers, 0)[0], self._expert_names(0, self.experts)[0])
        if extra := next((name for name in beyond if name in self._where), None):
            raise CheckpointError(
                f"The checkpoint at {self.folder} does not fit its config.json",
                f"It has {layers} layers of {self.experts} experts by config.json, but also holds {extra}.",
                "Download config.json and the weights of the same model.",
            )
        wide, narrow = self.config.intermediate_size, self.config.hidden_size
        for index, name in enumerate(self._every_expert_name()):
            if name not in self._where:
                raise CheckpointError(
                    f"The checkpoint at {self.folder} lacks weights",
                    f"No shard holds {name}.",
                    "Download the missing *.safetensors files.",
                )
            dtype, shape = self._stored[name]
            needed = (narrow, wide) if index % 3 == 2 else (wide, narrow)
            if dtype not in ("BF16", "F16", "F32") or shape != needed:
                raise CheckpointError(
                    f"The checkpoint at {self.folder} cannot be packed",
                    f"{name} is {dtype} of {shape}; floating point of {needed} is needed.",
                    "Use the model's original, unquantized checkpoint.",
                )


def _index(folder: Path) -> tuple[dict[str, Path], dict[str, tuple[str, tuple[int, ...]]]]:
    """Published tensor name -> shard, and -> dtype and shape.

    From the files' own headers: an index may name files that are not there.
    """
    shards = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not shards:
        pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
        raise CheckpointError(
            f"The checkpoint at {folder} has no safetensors files",
            f"It has {pickles[0]}, but pickle files can run code and are never read." if pickles else "",
            "Download the *.safetensors files of the model.",
        )
    where: dict[str, Path] = {}
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in shards:
        try:
            with safe_open(path, "pt") as shard:
                where |= dict.fromkeys(shard.keys(), path)
                slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
                stored |= {name: (str(part.get_dtype()), tuple(part.get_shape())) for name, part in slices.items()}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path.name} of the checkpoint cannot be read", str(error), "Download that file again."
            ) from error
    return where, stored
