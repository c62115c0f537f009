"""Checkpoints as GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) write them, of a small Mixtral: compact references.

Both see the demo's calibration text layer by layer, behind the layers that are rounded already. Grids are those of the
papers: from the least to the largest weight of each group.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from floe_chat.models.catalog import asset
from floe_chat.models.packing.calibration import read_tokens
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.models.test_quantized import words

BITS = 4
_MOST = 2**BITS - 1
_DAMPING = 0.01  # of GPTQ, of the mean of the diagonal
_STEPS = 20  # of AWQ's search for a scale, and for a clip down to half
_TOKENS = 1024  # by which AWQ compares clips
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Rounded(NamedTuple):
    """A matrix (N, K) in groups along K: codes (N, K), zeros and float16 scales (N, K / group)."""

    codes: Tensor
    zero: Tensor
    scale: Tensor

    def dense(self) -> Tensor:
        parts = self.codes.unflatten(1, (self.scale.shape[1], -1)) - self.zero[..., None]
        return (parts.half() * self.scale[..., None]).flatten(1).float()


def grid(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zeros of groups (..., n)."""
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / _MOST).clamp(min=1e-5).half()
    return scale, (-low / scale.float()).round().clamp(0, _MOST)


def nearest(matrix: Tensor, group: int) -> Rounded:
    """To the nearest."""
    parts = matrix.unflatten(1, (-1, group))
    scale, zero = grid(parts)
    codes = (parts / scale.float()[..., None]).round().add(zero[..., None]).clamp(0, _MOST)
    return Rounded(codes.flatten(1), zero, scale)


def gptq(matrix: Tensor, x: Tensor, group: int) -> Rounded:
    """Algorithm 1, column by column in their order, for inputs x (T, K)."""
    left, moments = matrix.clone(), x.T @ x
    dead = moments.diagonal() == 0
    moments.diagonal()[dead] = 1
    moments.diagonal().add_(_DAMPING * moments.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    flow = torch.linalg.cholesky(inverse, upper=True)
    codes, grids = torch.empty_like(left), list[tuple[Tensor, Tensor]]()
    for column in range(left.shape[1]):
        if column % group == 0:
            grids.append(grid(left[:, column : column + group]))
        scale, zero = grids[-1]
        codes[:, column] = (left[:, column] / scale.float()).round().add(zero).clamp(0, _MOST)
        found = (codes[:, column] - zero) * scale.float()
        error = (left[:, column] - found) / flow[column, column]
        left[:, column:] -= error[:, None] * flow[column, column:]
    scale, zero = (torch.stack(each, 1) for each in zip(*grids, strict=True))
    return Rounded(codes, zero, scale)


def clipped(matrix: Tensor, x: Tensor, group: int) -> Tensor:
    """AWQ's second search: each group within that part of its largest weight by which its products lose least."""
    x = x[:: max(1, len(x) // _TOKENS)].unflatten(1, (-1, group))
    parts = matrix.unflatten(1, (-1, group))
    peak = parts.abs().amax(-1, keepdim=True)
    wanted = torch.einsum("tgk,ngk->ngt", x, parts)
    best, least = peak, torch.full_like(peak, torch.inf)
    for step in range(_STEPS // 2):
        limit = peak * (1 - step / _STEPS)
        cut = parts.clamp(-limit, limit)
        found = nearest(cut.flatten(1), group).dense().view_as(parts)
        loss = (torch.einsum("tgk,ngk->ngt", x, found) - wanted).square().mean(-1, keepdim=True)
        best, least = torch.where(loss < least, limit, best), least.minimum(loss)
    return parts.clamp(-best, best).flatten(1)


@torch.inference_mode()
def smoothed(x: Tensor, matrices: Sequence[Tensor], loss: Callable[[list[Tensor]], float], group: int) -> Tensor:
    """AWQ's first search: by what columns (K,) are widened before they are rounded; x (T, K) their inputs."""
    size, found = x.abs().mean(0).clamp(min=1e-4), dict[float, Tensor]()
    for step in range(_STEPS):
        scale = size ** (step / _STEPS)
        scale = scale / (scale.max() * scale.min()).sqrt()
        trial = [nearest(matrix * scale, group).dense() / scale for matrix in matrices]
        found[loss(trial)] = scale
    return found[min(found)]


class Given(NamedTuple):
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def called_with(module: nn.Module, run: Callable[[], object]) -> Given:
    """What a module is called with, the last time."""
    found: list[Given] = []

    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(Given(args, kwargs))

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    run()
    hook.remove()
    return found[-1]


Keep = Callable[[str, Tensor, Rounded], None]
"""What takes a matrix by its published name: itself, which gets its rounded values, and these."""


class _Layer:
    """One layer of transformers' Mixtral with the states (N, T, H) that enter it. Matrices are its own memory."""

    def __init__(self, layer: Any, at: int, hidden: Tensor, others: dict[str, Any]) -> None:
        self.layer, self.hidden, self._others = layer, hidden, others
        self.attention, self.experts, self.router = layer.self_attn, layer.mlp.experts, layer.mlp.gate
        at_, names = f"model.layers.{at}", range(len(self.experts.down_proj))
        linears = {name: getattr(self.attention, f"{name}_proj") for name in "qkvo"}
        self.linears = {f"{at_}.self_attn.{name}_proj": linear.weight for name, linear in linears.items()}
        self.sides = [
            dict(zip((f"{at_}.block_sparse_moe.experts.{e}.w{n}" for n in (1, 3)), gate_up.chunk(2), strict=True))
            for e, gate_up in enumerate(self.experts.gate_up_proj)
        ]
        self.downs = {f"{at_}.block_sparse_moe.experts.{e}.w2": self.experts.down_proj[e] for e in names}

    def run(self) -> Tensor:
        found = self.layer(self.hidden, **self._others)
        return found[0] if isinstance(found, tuple) else found

    def given(self, module: nn.Module) -> Given:
        """What one of its modules is called with."""
        return called_with(module, self.run)

    def tokens(self) -> list[Tensor]:
        """What each expert is given, (T, H)."""
        (x, index, _), _ = self.given(self.experts)
        return [x[(index == expert).any(1)] for expert in range(len(self.downs))]

    def hidden_values(self, expert: int, x: Tensor) -> Tensor:
        gate, up = (nn.functional.linear(x, side) for side in self.sides[expert].values())
        return nn.functional.silu(gate) * up


def _by_gptq(layer: _Layer, keep: Keep, group: int) -> Tensor:
    *first, last = layer.linears.items()
    for part in (first, [last]):
        (x,), _ = layer.given(layer.attention.q_proj if part is first else layer.attention.o_proj)
        for name, matrix in part:
            keep(name, matrix, gptq(matrix, x.flatten(0, -2), group))
    for expert, x in enumerate(layer.tokens()):
        for name, matrix in layer.sides[expert].items():
            keep(name, matrix, gptq(matrix, x, group))
        name, matrix = [*layer.downs.items()][expert]
        keep(name, matrix, gptq(matrix, layer.hidden_values(expert, x), group))
    return layer.run()


def _by_awq(layer: _Layer, keep: Keep, group: int) -> Tensor:
    found, inner = layer.run(), layer.layer
    _, given = layer.given(layer.attention)
    (routed, *_), _ = layer.given(layer.experts)
    every = [side for sides in layer.sides for side in sides.values()]
    folded = (
        (inner.input_layernorm, [*layer.linears.values()][:3], [], lambda: layer.attention(**given)[0]),
        (inner.post_attention_layernorm, every, [layer.router.weight], lambda: layer.layer.mlp(routed[None])),
    )
    inputs = given["hidden_states"].flatten(0, -2), routed
    for (norm, matrices, exact, compute), x in zip(folded, inputs, strict=True):
        scale = smoothed(x, matrices, _loss(matrices, compute), group)
        norm.weight /= scale
        for matrix in (*matrices, *exact):
            matrix *= scale
    inputs = layer.tokens()
    for expert, (down, x) in enumerate(zip(layer.downs.values(), inputs, strict=True)):
        h = layer.hidden_values(expert, x)
        scale = smoothed(h, [down], _loss([down], partial(nn.functional.linear, h, down)), group)
        _, up = layer.sides[expert].values()
        up /= scale[:, None]
        down *= scale
    (x,), _ = layer.given(layer.attention.v_proj)
    (o,), _ = layer.given(layer.attention.o_proj)
    hidden = [layer.hidden_values(expert, given) for expert, given in enumerate(inputs)]
    for name, matrix in layer.linears.items():
        own = {"v": x, "o": o}.get(name[-6])
        keep(name, matrix, nearest(matrix if own is None else clipped(matrix, own.flatten(0, -2), group), group))
    for expert, sides in enumerate(layer.sides):
        name, down = [*layer.downs.items()][expert]
        for each, matrix, own in (*((*side, inputs[expert]) for side in sides.items()), (name, down, hidden[expert])):
            keep(each, matrix, nearest(clipped(matrix, own, group), group))
    return found  # what layers see was not rounded, as AutoAWQ has it


def _loss(matrices: Sequence[Tensor], compute: Callable[[], Tensor]) -> Callable[[list[Tensor]], float]:
    """What a trial of some matrices changes in what their module gives."""
    own, wanted = [matrix.clone() for matrix in matrices], compute()

    def loss(trial: list[Tensor]) -> float:
        for matrix, values in zip(matrices, trial, strict=True):
            matrix.copy_(values)
        found = float((compute() - wanted).square().mean())
        for matrix, values in zip(matrices, own, strict=True):
            matrix.copy_(values)
        return found

    return loss


@torch.no_grad()
def calibrated(source: Path, folder: Path, method: str, group: int) -> None:
    """Write the copy of a Mixtral in `source` that "GPTQ" or "AWQ" makes, of float16."""
    tokens = read_tokens(source, asset("calibration.txt").read_text(encoding="utf-8"))
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    tensors, stored = dict[str, Tensor](), dict[str, Tensor]()

    def keep(name: str, matrix: Tensor, made: Rounded) -> None:
        matrix.copy_(made.dense())
        codes, zero = made.codes.T.int(), made.zero.T.int()
        if method == "AWQ":
            codes, zero = (each.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1) for each in (codes, zero))
            found = {"qweight": words(codes, BITS), "qzeros": words(zero, BITS)}
        else:
            found = {"qweight": words(codes.T, BITS).T, "qzeros": words(zero - 1, BITS)}
            found["g_idx"] = torch.arange(len(codes), dtype=torch.int32) // group
        stored.update({f"{name}.{end}": value for end, value in (found | {"scales": made.scale.T}).items()})
        matrices.add(f"{name}.weight")

    matrices = set[str]()
    (hidden, *_), others = called_with(model.model.layers[0], partial(model, tokens, use_cache=False))
    for at, layer in enumerate(model.model.layers):
        hidden = (_by_awq if method == "AWQ" else _by_gptq)(_Layer(layer, at, hidden, others), keep, group)
    own = {name.replace(".mlp.gate.", ".block_sparse_moe.gate."): value for name, value in model.state_dict().items()}
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: own[name].half() for name in opened.keys() if name not in matrices}  # noqa: SIM118
    save_file({name: tensor.contiguous() for name, tensor in (tensors | stored).items()}, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stated = {"quant_method": method.lower(), "bits": BITS, "group_size": group, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": stated}), encoding="utf-8")
