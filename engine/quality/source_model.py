"""The 16-bit source as transformers computes it in float32, streamed: memory holds one layer and one expert of it.

The model is built on the meta device and called once for a whole batch. Hooks read each part's tensors out of the
shards when its turn comes and let them go afterwards, so masks, rope and order of calls are all the library's own. In
each layer the experts' stacked parameters give way to shelves, from which transformers' loop over experts takes one
matrix at a time; an expert that no token chose is not read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.checkpoint import Checkpoint, read_config
from ...models.errors import CheckpointError, UsageError
from ...models.families.derived import Derived
from ...models.families.family import EMBEDDING
from ...models.modules import library_model
from ...models.pack.packed_model import PackedModel
from ...models.pack.table import put
from ...models.packing.calibration import both_sides
from ..decoder.finite_check import first_nonfinite

# Of config.json: fields about its origin, how the library runs the model and when to stop, but not about what it
# computes.
_NO_PART_OF_THE_MODEL = {
    *("_name_or_path", "transformers_version", "dtype", "use_cache", "output_router_logits"),
    *("eos_token_id", "pad_token_id"),
    "quantization_config",  # a pack of a rounded copy is measured against the original
}

_ROUNDED = 0.2  # of an embedding's size: what rounding to four bits changes at most


class SourceModel:
    """A checkpoint that answers with logits.

    Args:
        report: called with each step in words. experts: layer and its router -> the module that computes its experts;
            transformers' own by default.

    Raises:
        CheckpointError: tensors that are missing or of another shape than config.json asks for.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        report: Callable[[str], None],
        experts: Callable[[int, nn.Module], nn.Module] | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self._checkpoint, self._report = checkpoint, report
        self._published = {checkpoint.family.module_name(name): name for name in checkpoint.dense_names()}
        config = checkpoint.config
        family = checkpoint.family
        derived = isinstance(family, Derived)
        if derived:
            model: Any = library_model.empty(config, torch.float32)
        else:
            with torch.device("meta"):
                # "eager" is the loop over experts that defines the model; others stack all experts' weights.
                model = AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, experts_implementation="eager", trust_remote_code=False
                )
            library_model.rename(model.model, family)
        if getattr(config, "tie_word_embeddings", False):
            self._published.setdefault("lm_head.weight", self._published.get(EMBEDDING, ""))
        put(model, {name: _Rows(checkpoint, name) for name in checkpoint.tables})
        for index, block in enumerate(family.blocks(model)):
            if experts is None and (family.biased or derived):
                block.experts = _Loop(checkpoint, index)
            elif experts is None:
                own = block.experts
                del own.gate_up_proj, own.down_proj
                own.gate_up_proj = _Shelf(checkpoint, index, slice(2))
                own.down_proj = _Shelf(checkpoint, index, slice(2, 3))
            else:
                block.experts = experts(index, family.router(block))
        for index, layer in enumerate(model.model.layers):
            self._stream(layer, f"model.layers.{index}", f"Source: layer {index + 1} of {config.num_hidden_layers}")
        for name, own in list(model.model.named_parameters(recurse=False)):
            _set(model.model, name, self._read(f"model.{name}", tuple(own.shape)))
        for name, part in model.model.named_children():  # of some families more than embedding and norm
            if name != "layers":
                said = {"embed_tokens": "embedding", "norm": "last norm"}.get(name, name.replace("_", " "))
                self._stream(part, f"model.{name}", f"Source: {said}")
        self._stream(model.lm_head, "lm_head", "Source: output head")
        library_model.renew(model, family, config, "cpu")
        self._model, self._divided = model.eval(), family.factor(config, family.divided)

    def logits(self, ids: Tensor, keep: int) -> Tensor:
        """ids (N, T) int64 -> logits of the last `keep` positions, (N, keep, V) float32.

        Raises:
            CheckpointError: a tensor cannot be read or is missing, or values are not finite; says where.
        """

        def run() -> Tensor:
            with torch.inference_mode():
                return self._model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits

        logits = run()
        if not bool(torch.isfinite(logits).all()):
            raise CheckpointError(
                f"The source at {self._checkpoint.folder} computes values that are not finite",
                f"The first come from {first_nonfinite(self._model, run)}.",
                "Download the checkpoint again.",
            )
        return logits

    def states(self, ids: Tensor) -> Tensor:
        """ids (N, T) int64 -> what enters the output head, (N, T, H) float32."""
        with torch.inference_mode():
            return self._model.model(input_ids=ids, use_cache=False).last_hidden_state

    def head(self, states: Tensor) -> Tensor:
        """states (..., H) -> logits (..., V) float32."""
        with torch.inference_mode():
            return self._model.lm_head(states) / self._divided

    def _stream(self, module: nn.Module, prefix: str, step: str) -> None:
        places = [(name, tuple(tensor.shape)) for name, tensor in module.state_dict().items()]

        def fill(_module: nn.Module, _inputs: object) -> None:
            self._report(step)
            for name, shape in places:
                _set(module, name, self._read(f"{prefix}.{name}", shape))

        def empty(_module: nn.Module, _inputs: object, _output: object) -> None:
            for name, shape in places:
                _set(module, name, torch.empty(shape, device="meta"))

        module.register_forward_pre_hook(fill)
        module.register_forward_hook(empty)

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        published = self._published.get(name)
        tensor = self._checkpoint.tensor(published) if published else None
        if tensor is None or tuple(tensor.shape) != shape:
            have = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
            raise CheckpointError(
                f"The checkpoint at {self._checkpoint.folder} does not fit its config.json",
                f"{published or name} is {have}; {shape} is needed.",
                "Download config.json and the weights of the same model.",
            )
        return tensor.float() if tensor.is_floating_point() else tensor


class _Loop(nn.Module):
    """A layer's experts, each read when tokens have chosen it, whatever functions and biases they have."""

    def __init__(self, checkpoint: Checkpoint, layer: int) -> None:
        super().__init__()
        self._checkpoint, self._layer = checkpoint, layer

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (B, H), top_k_index and top_k_weights (B, K) -> (B, H)."""
        out = torch.zeros_like(hidden)
        for number in top_k_index.unique().tolist():
            token, slot = (top_k_index == number).nonzero(as_tuple=True)
            expert = self._checkpoint.whole_expert(self._layer, number)
            gate, up = both_sides(hidden[token], expert, self._checkpoint.family.experts_by)
            bias = None if expert.biases is None else expert.biases.down.to(hidden.dtype)
            y = F.linear(gate * up, expert.down.to(hidden.dtype), bias)
            out.index_add_(0, token, y * top_k_weights[token, slot, None])
        return out


class _Rows(nn.Module):
    """A table, of which each row is read when it is looked up."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        super().__init__()
        self._checkpoint, self._name, self.weight = checkpoint, name, torch.empty(0)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (...) -> (..., n) float32."""
        wanted, place = ids.flatten().unique(return_inverse=True)
        return self._checkpoint.rows(self._name, wanted).float()[place].view(*ids.shape, -1)


class _Shelf:
    """Replaces a stacked parameter (E, ...) of transformers' experts; indexing reads one expert's part of it."""

    def __init__(self, checkpoint: Checkpoint, layer: int, parts: slice) -> None:
        self._checkpoint, self._layer, self._parts = checkpoint, layer, parts

    def __getitem__(self, expert: Tensor | int) -> Tensor:
        return torch.cat([part.float() for part in self._checkpoint.expert(self._layer, int(expert))[self._parts]])


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    part = module.get_submodule(owner)
    setattr(part, leaf, nn.Parameter(value, requires_grad=False) if leaf in part._parameters else value)  # pyright: ignore[reportPrivateUsage]


def identify(source: Checkpoint, packed: PackedModel) -> str:
    """Check that `packed` was made from `source`; returns a sha256 that stands for the source's weights.

    Configurations have to agree, and every tensor that the pack holds unrounded (embedding, norms, routers) has to
    be the source's own, value by value. The sha256 covers these, the configuration, and size and time of each shard.
    Of a pack of a rounded copy, `source` may be the original: only the embedding has to be about the same, as copies
    have other types and AWQ's have other norms.

    Raises:
        UsageError: the source is another model; names the difference.
    """
    ours, theirs = (_model_fields(config) for config in (read_config(packed.folder), source.config))
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise _another(source, packed, f"Its {name} is {theirs.get(name)}, the pack's is {ours.get(name)}.")
    digest = hashlib.sha256(repr(sorted(theirs.items())).encode())
    names = set(source.dense_names())
    for name, kept in sorted(packed.dense().items()):
        if name not in names:
            continue
        own = source.tensor(name).to(kept.dtype)
        if not torch.equal(own, kept) and not (packed.manifest.source.rounding and _alike(name, own, kept)):
            raise _another(source, packed, f"The values of {name} differ.")
        digest.update(name.encode() + own.contiguous().view(torch.uint8).numpy().tobytes())
    for path in sorted(source.folder.glob("*.safetensors")):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def _alike(name: str, own: Tensor, kept: Tensor) -> bool:
    if own.shape != kept.shape:
        return False
    return EMBEDDING not in name or float((own.float() - kept.float()).norm()) < _ROUNDED * float(own.float().norm())


def _model_fields(config: Any) -> dict[str, object]:
    return {name: value for name, value in config.to_dict().items() if name not in _NO_PART_OF_THE_MODEL}


def _another(source: Checkpoint, packed: PackedModel, cause: str) -> UsageError:
    return UsageError(
        f"{source.folder} is not the source of this pack",
        f"{cause} The pack was made from a folder called {packed.manifest.source.name}.",
        "Give the checkpoint that was packed: --source FOLDER.",
    )
