"""Many settings of one model side by side, computed from its 16-bit source in one streamed pass.

The batch holds the same windows once for every candidate. Attention, norms and routers are the source's own for all;
in each layer's experts every candidate's tokens meet its own widths, thresholds and router rules, and the projection by
which the pack skips neurons there. So a source larger than memory is read once for dozens of settings. Calibration
passages, computed unrounded, travel in front of the batch, and each layer's quantile tables come from them when its
turn comes, much as in packing (`models/packing/pack.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import operations as kernels
from ...kernels.activation import Function, Projection, applied, beside, function_of
from ...kernels.codes import group_size
from ...kernels.layouts import VectorLayout
from ...kernels.rule import Rule
from ...kernels.types import Limits
from ...models.checkpoint import Checkpoint
from ...models.errors import UsageError
from ...models.packing import calibration
from ...models.packing.allotment import LayerTables, spread
from ...models.packing.rounding import Hessian, hessian, round_down, round_for
from ..experts import substitution
from .half_resident import RESIDENT_SHARE
from .pack_source import PackSource, model_of

WEIGHED = Rule(weighed=True)
MAJOR, WHOLE = 1, 2  # how many halves of an expert's neurons are computed
_FACTOR_BYTES = 1 + 4 / 64  # per value of a compensator's factors: 8-bit codes in groups of 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """How experts are stored and what a token may skip. The defaults are the source itself.

    Attributes:
        up, gate, down: bits per weight; as in a pack, `up` are those of a layer's signal and `gate` those of the other
            projection. rank: of the low-rank compensator of the signal, 0 for none.
        rule: what a token may skip; `late` has no effect here, since all rows are there.
    """

    up: int = 16
    gate: int = 16
    down: int = 16
    rank: int = 0
    rule: Rule = WEIGHED


@dataclass(slots=True)
class Taken:
    """Expert work per token: expert halves examined, neurons whose row was read, and neurons whose down was read."""

    halves: float = 0.0
    active: float = 0.0
    kept: float = 0.0

    def nbytes(self, setting: Candidate, row: VectorLayout, neurons: int) -> float:
        """Bytes of weights that this work reads, scales included; `row`: of H values, at any width."""
        gate, down = (replace(row, bits=bits).nbytes for bits in (setting.gate, setting.down))
        up = replace(row, bits=setting.up).nbytes_apart
        factors = setting.rank * (row.n + neurons / 2) * _FACTOR_BYTES
        return self.halves * (neurons / 2 * up + factors) + self.active * gate + self.kept * down

    def add(self, halves: float, active: float, kept: float) -> None:
        """More work."""
        self.halves += halves
        self.active += active
        self.kept += kept

    def times(self, share: float) -> Taken:
        """A share of it."""
        return Taken(self.halves * share, self.active * share, self.kept * share)


def together(parts: Iterable[Taken]) -> Taken:
    """All of it."""
    found = Taken()
    for part in parts:
        found.add(part.halves, part.active, part.kept)
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate's results and costs.

    Attributes:
        logits: (N, keep, V) float32, of the last positions of each window; a function, since all of them together may
            be large.
        taken: of all layers. missed: the part for absent experts, if the last used RESIDENT_SHARE of each layer's
            experts is resident.
    """

    setting: Candidate
    logits: Callable[[], Tensor]
    taken: Taken
    missed: Taken


def compute(
    checkpoint: Checkpoint | PackSource,
    settings: Sequence[Candidate],
    passages: Tensor,
    windows: Tensor,
    keep: int,
    report: Callable[[str], None],
    signals: Sequence[Projection] = (),
    *,
    short: bool = True,
    whole: Sequence[int] = (),
) -> list[Outcome]:
    """Run every setting over the same windows.

    Args:
        passages: (C, T) int64, to calibrate thresholds on. windows: (N, T). keep: positions to give logits of, from
            each window's end. signals: of each layer with experts; empty: up in all of them. short: whether scales
            are bytes (`VectorLayout.short`). whole: layers in which no neuron may be skipped.

    Raises:
        CheckpointError: a tensor cannot be read or is missing.
    """
    passages = passages[:, : windows.shape[1]]
    lead, size = passages.numel(), windows.numel()
    layers: list[_Experts] = []

    def experts(layer: int, router: nn.Module) -> nn.Module:
        signal = signals[layer] if signals else "up"
        rules = [setting.rule.at(layer) for setting in settings]
        rules = [rule.of_whole_neurons() for rule in rules] if layer in whole else rules
        own = [replace(setting, rule=rule) for setting, rule in zip(settings, rules, strict=True)]
        layers.append(_Experts(checkpoint, layer, router, own, lead, size, signal, short=short))
        return layers[-1]

    if checkpoint.family.experts_by != "silu":
        raise UsageError(
            f"Widths cannot be compared for {checkpoint.family.called}",
            "Its experts are no plain SwiGLU, which is what is tried at other widths.",
            "Pack it, and run `floe-chat tune` on the pack.",
        )
    model = model_of(checkpoint, report, experts)
    states = model.states(torch.cat([passages, windows.repeat(len(settings), 1)]))[len(passages) :]
    count = len(windows)

    def outcome(place: int, setting: Candidate) -> Outcome:
        own = states[place * count : (place + 1) * count, -keep:].clone()
        taken, missed = (
            together(parts).times(1 / size)
            for parts in ([layer.taken[place] for layer in layers], [layer.missed[place] for layer in layers])
        )
        return Outcome(setting, lambda: model.head(own), taken, missed)

    return [outcome(place, setting) for place, setting in enumerate(settings)]


class _Experts(nn.Module):
    """Replaces a layer's experts; the first `lead` tokens calibrate, then `size` tokens of each setting."""

    def __init__(
        self,
        checkpoint: Checkpoint | PackSource,
        layer: int,
        router: nn.Module,
        settings: Sequence[Candidate],
        lead: int,
        size: int,
        signal: Projection,
        *,
        short: bool,
    ) -> None:
        super().__init__()
        self._checkpoint, self._layer, self._lead, self._size = checkpoint, layer, lead, size
        self._signal: Projection = signal
        self._short = short
        self._settings = settings
        self.taken, self.missed = ([Taken() for _ in settings] for _ in range(2))
        self._probabilities, self._normalized = torch.empty(0), checkpoint.family.normalizes(router)
        self._heard = router.register_forward_hook(self._note)

    def _note(self, _module: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> None:
        self._probabilities = output[0].float().softmax(-1)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (B, H), top_k_index and top_k_weights (B, K) -> (B, H)."""
        self._heard.remove()  # a pack's router outlives this pass
        lead, out = self._lead, torch.zeros_like(hidden)
        blocks = [slice(lead + i * self._size, lead + (i + 1) * self._size) for i in range(len(self._settings))]
        routes = [
            _Route(setting, self._probabilities[block], top_k_index[block], top_k_weights[block], self._normalized)
            for setting, block in zip(self._settings, blocks, strict=True)
        ]
        self._probabilities = torch.empty(0)
        inputs = cache(lambda: hessian(hidden[:lead]))
        worths = calibration.worths(top_k_weights[:lead])
        shares = self._shares(hidden[:lead], top_k_index[:lead], top_k_weights[:lead])
        for number in range(self._checkpoint.experts):
            token, slot = (top_k_index[:lead] == number).nonzero(as_tuple=True)
            seen = (hidden[token], worths[token, slot, None]) if token.numel() else (hidden[:lead], torch.ones(lead, 1))
            expert = _Expert(
                *self._checkpoint.expert(self._layer, number),
                *seen,
                inputs,
                self._signal,
                {name: layer[number] for name, layer in shares.items()},
                short=self._short,
            )
            y, _, _ = expert(Candidate(), hidden[token], WHOLE, torch.ones(len(token)))
            out.index_add_(0, token, y * top_k_weights[token, slot, None])
            for place, (setting, block, route) in enumerate(zip(self._settings, blocks, routes, strict=True)):
                for part in (MAJOR, WHOLE):
                    token, slot = ((route.index == number) & (route.halves == part)).nonzero(as_tuple=True)
                    if not token.numel():
                        continue
                    y, active, kept = expert(setting, hidden[block][token], part, route.eases[token, slot])
                    out[block].index_add_(0, token, y * route.weights[token, slot, None])
                    for taken, counted in ((self.taken, slice(None)), (self.missed, route.absent[token, slot])):
                        work = part * len(token[counted]), int(active[counted].sum()), int(kept[counted].sum())
                        taken[place].add(*work)
        return out

    def _shares(self, hidden: Tensor, index: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """What each expert leaves out (E, Q), 0..1, where the layer leaves out 0 to 100 %: of v, and of h."""
        tables, worths = LayerTables(self._checkpoint.experts), calibration.worths(weights)
        for number in range(self._checkpoint.experts):
            token, slot = (index == number).nonzero(as_tuple=True)
            if not token.numel():
                continue
            gate, up, down = (part.float() for part in self._checkpoint.expert(self._layer, number))
            g, u = F.silu(F.linear(hidden[token], gate)), F.linear(hidden[token], up)
            v, each = g if self._signal == "gate" else u, (token, slot, None)
            tables.measure(number, v, g * u, down.T, worths[each], weights[each])
        return dict(zip(("v", "h"), tables.shares().values(), strict=True))


class _Route:
    """A setting's routing: index, weights, halves and eases (B, K), and whether the expert was absent."""

    def __init__(
        self, setting: Candidate, probabilities: Tensor, index: Tensor, weights: Tensor, normalized: bool
    ) -> None:
        experts, rule = probabilities.shape[1], setting.rule
        capacity = max(1, round(RESIDENT_SHARE * experts))
        if rule.alpha:
            resident = substitution.Residency(capacity)
            index, weights = substitution.substitute_all(
                probabilities, index, weights, resident, rule.alpha, normalized=normalized
            )
        self.index, self.weights = index, weights
        # With limits of one, the thresholds are the factors of the experts' limits.
        ones = Limits(torch.ones(rule.parts * experts))
        eases = kernels.select(index, weights, ones, rule).thresholds.view(*index.shape, rule.parts)
        self.halves = eases.isfinite().sum(-1) * (WHOLE // rule.parts)
        self.eases = eases[..., 0].to(weights.dtype)
        halves = self.halves.tolist()
        resident = substitution.Residency(capacity)
        self.absent = torch.tensor(
            [
                [bool(part) and not resident.use(expert) for expert, part in zip(row, parts, strict=True)]
                for row, parts in zip(index.tolist(), halves, strict=True)
            ]
        )


class _Expert:
    """One expert at any width, with thresholds from its calibration tokens."""

    def __init__(
        self,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        seen: Tensor,
        worth: Tensor,
        inputs: Callable[[], Hessian],
        signal: Projection,
        shares: dict[str, Tensor],
        *,
        short: bool,
    ) -> None:
        """seen (T, H) are its calibration tokens, worth (T, 1) as `calibration.worths` gives it.

        shares: (Q,) what it leaves out of v and of h where its layer leaves out 0 to 100 %.
        """
        self._shares = shares
        gate, up, self._down, self._inputs = gate.float(), up.float(), down.float(), inputs
        self._seen, self._worth, self._short = seen, worth, short
        self._signal, self._other = (gate, up) if signal == "gate" else (up, gate)
        self._by: Function = function_of(signal, "silu")
        self._beside: Function = function_of(beside(signal), "silu")
        # Rounding takes much longer than multiplying: each width is made once, when the first setting asks for it.
        self._made: dict[tuple[str | int, ...], Tensor] = {}

    def __call__(self, setting: Candidate, x: Tensor, part: int, ease: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, H) -> y (T, H), and how many neurons of each token were active and kept, (T,) each.

        ease: (T,) what multiplies both thresholds of each token, see `Rule.weighed`.
        """
        s, rule, each = setting, setting.rule, ease[:, None]
        v = self._v(s, x)
        active = ~(v.abs() < rule.theta)
        if rule.sparsity:
            active &= ~(v.abs() < self._v_limit(s) * each)
        if part == MAJOR:
            active &= ~self._minor(s)
        h = self._h(s, x, v)
        kept = active
        if rule.product:
            kept = active & ~(h.abs() < self._h_limit(s) * each)
        return h.masked_fill(~kept, 0) @ self._down_at(s), active.sum(-1), kept.sum(-1)

    def _v(self, s: Candidate, x: Tensor) -> Tensor:
        matrix = self._once(
            ("signal", s.up, s.rank), lambda: self._compensated(self._rounded(self._signal, s.up), s.rank)
        )
        return applied(self._by, F.linear(x, matrix))

    def _h(self, s: Candidate, x: Tensor, v: Tensor) -> Tensor:
        matrix = self._once(("other", s.gate), lambda: self._rounded(self._other, s.gate))
        return applied(self._beside, F.linear(x, matrix)) * v

    def _down_at(self, s: Candidate) -> Tensor:
        """(F, H): the columns, as neurons have them."""
        return self._once(("down", s.down, *_sides(s)), lambda: self._rounded_down(s))

    def _order(self, s: Candidate) -> Tensor:
        """The neurons by falling importance, as a pack of these widths has them."""

        def make() -> Tensor:
            some = self._seen[spread(len(self._seen))]
            return calibration.importance(self._h(s, some, self._v(s, some)), self._down).argsort(descending=True)

        return self._once(("order", *_sides(s)), make)

    def _minor(self, s: Candidate) -> Tensor:
        """Which neurons are not of the major half, (F,)."""
        order = self._order(s)
        major = order[: -(-len(order) // 2)]
        return torch.ones(len(order), dtype=torch.bool).index_fill_(0, major, False)

    def _v_limit(self, s: Candidate) -> Tensor:
        return self._limit(("v", s.up, s.rank), s, s.rule.sparsity, lambda: self._v(s, self._seen))

    def _h_limit(self, s: Candidate) -> Tensor:
        values = ("h", s.up, s.rank, s.gate)
        return self._limit(values, s, s.rule.product, lambda: self._h(s, self._seen, self._v(s, self._seen)))

    def _limit(self, values: tuple[str | int, ...], s: Candidate, share: float, make: Callable[[], Tensor]) -> Tensor:
        """The threshold under which a share of the values is, of those times the router's weight if it is weighed."""
        worth = self._worth if s.rule.weighed else 1.0
        table = self._once((*values, s.rule.weighed), lambda: calibration.quantile_table(make() * worth))
        if s.rule.weighed:
            share = float(calibration.threshold_at(self._shares[str(values[0])][None], share))
        return calibration.threshold_at(table[None], share)[0]

    def _rounded(self, matrix: Tensor, bits: int) -> Tensor:
        """A projection's rows as a pack of that width represents them."""
        if bits == 16:
            return matrix
        group = group_size(matrix.shape[1])
        return round_for(self._inputs(), matrix, bits, group, short=self._short).dense()

    def _rounded_down(self, s: Candidate) -> Tensor:
        """(F, H): down's columns likewise, by falling importance, for what the rounded neurons give."""
        down = self._down.T
        if s.down == 16:
            return down
        order = self._order(s)
        hidden = self._h(s, self._seen, self._v(s, self._seen))[:, order]
        codes = round_down(hidden, down[order], s.down, group_size(down.shape[1]), short=self._short)
        return torch.empty_like(down).index_copy_(0, order, codes.dense())

    def _once(self, key: tuple[str | int, ...], make: Callable[[], Tensor]) -> Tensor:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _compensated(self, rounded: Tensor, rank: int) -> Tensor:
        """`rounded` plus the best product of two factors of `rank` for inputs like those seen.

        The rounding error R matters through R · x: its columns are weighted by the inputs' root mean square before the
        singular values are cut off.
        """
        if not rank:
            return rounded
        weight = self._seen.pow(2).mean(0).sqrt().clamp_min(1e-6)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the factors start from a random subspace; the same command gives the same figures
            left, values, right = torch.svd_lowrank((self._signal - rounded) * weight, q=rank, niter=4)
        return rounded + (left * values) @ (right.T / weight)


def _sides(s: Candidate) -> tuple[int, int, int]:
    return s.up, s.gate, s.rank


def bytes_per_setting(checkpoint: Checkpoint | PackSource, tokens: int) -> int:
    """Memory that one more setting takes in a pass over `tokens` tokens: a few hidden states, and one expert's work."""
    return 4 * tokens * (8 * checkpoint.config.hidden_size + 3 * checkpoint.neurons)
