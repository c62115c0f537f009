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
    """

    model_type: str
    expert: str
    gate: str
    up: str
    down: str
    renames: tuple[tuple[str, str], ...] = ()

    def module_name(self, published: str) -> str:
        """The name in transformers' module of a dense tensor's published name; the only place that renames."""
        for old, new in self.renames:
            published = published.replace(old, new)
        return published


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
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read", str(error), "Download the checkpoint again.") from error
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(
            f"The checkpoint at {folder} cannot be packed",
            f"Its model type is {model_type!r}, which is not a Mixture-of-Experts model that floe-chat knows.",
            f"Use a checkpoint of one of these types: {known}.",
        )
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} does not describe a model", str(error), "Download it again.") from error


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
        self._where = _index(folder)
        self._check()
        dtype = self.expert(0, 0)[0].dtype
        self.exact = dtype in (torch.bfloat16, torch.float16)
        self.float16 = dtype if self.exact else torch.bfloat16

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

    def _check(self) -> None:
        layers = self.config.num_hidden_layers
        needed = (n for la in range(layers) for e in range(self.experts) for n in self._expert_names(la, e))
        if missing := next((name for name in needed if name not in self._where), None):
            raise CheckpointError(
                f"The checkpoint at {self.folder} lacks weights",
                f"No shard holds {missing}.",
                "Download the missing *.safetensors files.",
            )


def _index(folder: Path) -> dict[str, Path]:
    """Published tensor name -> shard. From the files' own headers: an index may name files that are not there."""
    shards = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not shards:
        pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
        raise CheckpointError(
            f"The checkpoint at {folder} has no safetensors files",
            f"It has {pickles[0]}, but pickle files can run code and are never read." if pickles else "",
            "Download the *.safetensors files of the model.",
        )
    where: dict[str, Path] = {}
    for path in shards:
        try:
            with safe_open(path, "pt") as shard:
                where |= dict.fromkeys(shard.keys(), path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path.name} of the checkpoint cannot be read", str(error), "Download that file again."
            ) from error
    return where
