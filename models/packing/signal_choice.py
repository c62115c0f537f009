"""Which projection tells best, before a neuron's row is read, whether it may be skipped.

FloE skips by |up · x|, CORM by |silu(gate · x)|: which loses less at the same share is a property of a layer. In the
demo the first layers lose up to twice as much by the gate, and the last ones three to five times as much by up
(tests/bench/LOG.md). So each layer is measured when its turn to be packed comes.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ...kernels.activation import Projection
from ...kernels.operations import fast_type
from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..pack.quantize import finite
from .allotment import LEAST, directions, spread
from .calibration import both_sides, worths

AUTO: Literal["auto"] = "auto"  # each layer as measured
SHARE, PRODUCT = 0.6, 0.8  # skipped by the signal and by the product: about what Balanced skips
OUT_OF_PROPORTION = 10.0  # times what an expert of the layer usually loses by token
LARGE_PART = 0.2  # of what all experts of the layer lose
MOST_LOST = 0.25  # of the energy of a layer's output: it then moves by half its length
_SAMPLE = 4  # experts: the first, which are read next anyway


def unpackable(layer: int, expert: int, cause: str) -> CheckpointError:
    """The error for weights that cannot be packed."""
    title = f"Expert {expert} of layer {layer} cannot be packed"
    return CheckpointError(title, cause, "Download the checkpoint again.")


def choose(source: Checkpoint, layer: int, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Projection:
    """The projection by which a layer loses less of its output on calibration text, both reading as many bytes.

    Args:
        layer: number among those with experts. hidden: (B, H) its input. chosen, weights: (B, K) its router's.
    """
    lost, each = {"up": 0.0, "gate": 0.0}, worths(weights.float())
    for expert in range(min(_SAMPLE, source.experts)):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        if len(token) < LEAST:
            continue
        some = spread(len(token))
        token, slot = token[some], slot[some]
        found = source.whole_expert(layer, expert)
        try:
            for part in (found.gate, found.up, found.down):
                finite(part)
        except ValueError as error:
            raise unpackable(layer, expert, f"{error}.") from error
        x, weight, worth = (
            hidden[token].to(fast_type(hidden.device)),
            weights[token, slot, None].float(),
            each[token, slot, None],
        )
        signals = dict(zip(("gate", "up"), both_sides(x, found, source.family.experts_by), strict=True))
        h = signals["up"] * signals["gate"]
        quiet, down = _weakest(h * worth, PRODUCT), directions(found.down.T.to(x.dtype))
        for name, v in signals.items():
            skipped = _weakest(v * worth, SHARE) | quiet
            left = (h * weight).to(x.dtype).masked_fill(~skipped, 0) @ down
            lost[name] += float(left.float().square().sum())
    return "gate" if lost["gate"] < lost["up"] else "up"


def exempt(lost: Tensor, tokens: Tensor) -> list[int]:
    """Experts of a layer that may not be skipped in part: those that lose out of proportion ("super experts",
    arXiv 2507.23279), both by token and of all that the layer loses.

    Args:
        lost: (E,) energy that their outputs lose at those shares. tokens: (E,) on how many.
    """
    used = tokens >= LEAST
    if int(used.sum()) < 2 or not float(lost[used].sum()):
        return []
    each = lost / tokens.clamp(min=1)
    usual = each[used].median()
    found = used & (each > OUT_OF_PROPORTION * usual) & (lost > LARGE_PART * lost[used].sum())
    return found.nonzero().squeeze(1).tolist()


def skips_nothing(lost: Tensor, energy: Tensor) -> bool:
    """Whether a layer's neurons may not be skipped at all: what the signal and the product call weak is not.

    At those shares, layers of the demo lose up to 0.05 of their output's energy, random weights 0.09 by the signal that
    is chosen and 0.16 by the other one; where values say nothing of what a neuron adds, 0.4 and more are lost
    (tests/bench/LOG.md).

    Args:
        lost: (E,) energy that the outputs of the experts that are not exempt lose. energy: (E,) of all outputs.
    """
    return float(lost.sum()) > MOST_LOST * float(energy.sum())


def _weakest(values: Tensor, share: float) -> Tensor:
    """Which values are among that share of them, by magnitude."""
    sizes = values.abs()
    flat = sizes.flatten()
    return sizes < flat.kthvalue(max(1, round(share * flat.numel()))).values
