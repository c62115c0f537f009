"""Which experts the next layer will choose, learned while packing (FloE section 3.3.1).

Each layer but the last gets a small predictor: from what its MoE block is given and from the experts that it chose
itself (the expert history) to scores of the next layer's experts. It begins as the next layer's own router, which needs
no training (CORM section 4.2), and learns what calibration text says beyond that: a linear map by ridge regression on
the next router's scores, and in shallow layers, where neighbours have least in common, a two-layer network on top.

Shapes: B tokens, H hidden size, E experts, K chosen, W width of the network, X = H + E + 1 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import operations as kernels

DTYPE = torch.bfloat16  # of stored weights: the column of an input that hardly varies may exceed float16's range
PREFIX = "lookahead"
RECALL = f"{PREFIX}.recall"

# A Mixtral's first layer has 2 M parameters and its last 32 K, as in the paper; other sizes in proportion.
_WIDEST, _DEPTH_RATIO = 1 / 8, 64.0  # of H; first layer's width over the last's
_LEAST_TOKENS = 64  # less text than this teaches nothing
_BLOCKS, _CHOOSE, _HELD_OUT = 16, (3, 11), (7, 15)  # the text is cut in 16 blocks; those that choose, those that judge
_RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # relative to the inputs' mean square
_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the network's correction that may be taken
_WORTH = 0.01  # recall that the network has to add; less may be chance
_EPOCHS, _BATCH, _RATE, _DECAY = 20, 256, 1e-2, 0.3


def carry(norm: Tensor, following: Tensor) -> Tensor:
    """The factors that turn one layer's MoE input into a guess of the next one's: its norm's weights (H,) over the
    layer's own.

    Both inputs are the residual stream divided by its size, times the weights of their norm; the stream itself changes
    little from layer to layer.
    """
    ratio = following.float() / norm.float()
    return torch.where(ratio.isfinite(), ratio, 0.0)


def inputs(hidden: Tensor, chosen: Tensor, experts: int) -> Tensor:
    """hidden (B, H) and the chosen experts (B, K) as a predictor reads them: (B, X), the latter as ones among zeros."""
    history = hidden.new_zeros(len(hidden), experts + 1).scatter_(1, chosen, 1.0)
    history[:, -1:].fill_(1.0)
    return torch.cat([hidden, history], dim=1)


def width(layer: int, layers: int, hidden: int, experts: int) -> int:
    """Width of the network of `layer`, falling with depth; 0 where it would be no wider than there are experts."""
    found = hidden * _WIDEST * _DEPTH_RATIO ** (-layer / max(1, layers - 2))
    return round(found) if found > experts else 0


@dataclass(frozen=True, slots=True)
class Lookahead:
    """One layer's predictor of the next layer's experts.

    Attributes:
        linear: (E, X). inner: (W, X) and outer: (E, W) of the network; None where there is none.
    """

    linear: Tensor
    inner: Tensor | None = None
    outer: Tensor | None = None

    def scores(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """hidden (B, H), chosen (B, K) of this layer -> scores (B, E) of the next one's experts, higher is likelier."""
        x = inputs(hidden, chosen, len(self.linear))
        found = kernels.plain(x, self.linear)
        if self.inner is not None and self.outer is not None:
            found = found + kernels.plain(F.silu(kernels.plain(x, self.inner)), self.outer)
        return found

    def to(self, device: str | torch.device, dtype: torch.dtype) -> Lookahead:
        """The same predictor on a device."""
        parts = (self.linear, self.inner, self.outer)
        return Lookahead(*(None if part is None else part.to(device, dtype) for part in parts))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class Lesson:
    """The training data of one layer's predictor: tokens as they passed this layer and the next.

    Attributes:
        hidden: (B, H) given to this layer's MoE block. chosen: (B, K) its experts.
        logits: (B, E) of the next layer's router. following: (B, K) the experts chosen there.
        router: (E, H) the next layer's, made to read this layer's input.
    """

    hidden: Tensor
    chosen: Tensor
    logits: Tensor
    following: Tensor
    router: Tensor


def learn(lesson: Lesson, width: int, seed: int) -> tuple[Lookahead, float, float] | None:
    """Train one predictor; the same lesson and seed give the same one.

    Takes about 360 MB beside the lesson itself (64 MB) at H = 4096 and the calibration's 4,096 tokens: the inputs,
    what is learned from of them, and two square matrices of H.

    Returns:
        the predictor as it is stored, its recall of the K chosen experts on tokens held out, and the router's there.
        None if there are too few tokens, or some that are not finite.
    """
    # Packing runs in inference mode, where nothing can be trained.
    with torch.inference_mode(False), torch.enable_grad():
        finite = bool(lesson.hidden.isfinite().all()) and bool(lesson.logits.isfinite().all())
        if len(lesson.hidden) < _LEAST_TOKENS or not finite:
            return None
        found = _Course(lesson).take(width, seed)
        held = _part(len(lesson.hidden), _HELD_OUT)
        hidden, chosen, following = (t[held] for t in (lesson.hidden, lesson.chosen, lesson.following))
        with torch.no_grad():
            learned = recall(found.to("cpu", torch.float32).scores(hidden, chosen), following)
            return found, learned, recall(F.linear(hidden, lesson.router), following)


class _Course:
    """One lesson cut in parts: most tokens are learned from, some choose between the results."""

    def __init__(self, lesson: Lesson) -> None:
        experts, tokens = len(lesson.router), len(lesson.hidden)
        x = inputs(lesson.hidden.float(), lesson.chosen, experts)
        self._choose = _part(tokens, _CHOOSE)
        self._study = ~(self._choose | _part(tokens, _HELD_OUT))
        # Inputs of like size: the regression weighs them alike, and the network is easier to train.
        self._size = x[self._study].square().mean(0).sqrt()
        self._size[self._size < 1e-4 * self._size.mean()] = torch.inf  # inputs that hardly vary teach nothing
        self._x = x.div_(self._size)
        self._router = torch.zeros(experts, x.shape[1])
        self._router[:, : lesson.router.shape[1]] = lesson.router
        self._start = F.linear(lesson.hidden.float(), lesson.router.float())
        self._logits, self._following = lesson.logits.float(), lesson.following
        # Half what was chosen, half how sure the router was: better than either alone, at the first layer above all.
        one_hot = torch.zeros_like(self._logits).scatter_(1, lesson.following, 1.0 / lesson.following.shape[1])
        self._target = (one_hot + self._logits.softmax(1)) / 2

    def take(self, width: int, seed: int) -> Lookahead:
        change, scores = self._ridge()
        linear = (self._router + change / self._size).to(DTYPE)
        if not width:
            return Lookahead(linear)
        inner, outer = self._network(scores, width, seed)
        with torch.no_grad():
            correction = F.linear(F.silu(F.linear(self._x, inner)), outer)
            found = {share: self._recall(scores + share * correction) for share in _SHARES}
        share = max(found, key=found.__getitem__)
        if found[share] < self._recall(scores) + _WORTH:
            return Lookahead(linear)
        return Lookahead(linear, (inner.detach() / self._size).to(DTYPE), (share * outer.detach()).to(DTYPE))

    def _recall(self, scores: Tensor) -> float:
        return recall(scores[self._choose], self._following[self._choose])

    def _loss(self, scores: Tensor) -> float:
        """Cross entropy with the router's own probabilities, on the tokens that choose."""
        return float(-(self._logits.softmax(1) * scores.log_softmax(1))[self._choose].sum(1).mean())

    @torch.no_grad()
    def _ridge(self) -> tuple[Tensor, Tensor]:
        """The best change of the router (E, X) for inputs of like size, and the scores (B, E) it then gives."""
        x, rest = self._x[self._study], (self._logits - self._start)[self._study]
        square, product = x.T @ x / len(x), x.T @ rest / len(x)
        best, scores, loss = torch.zeros_like(self._router), self._start, self._loss(self._start)
        diagonal = square.diagonal().clone()
        for ridge in _RIDGES:
            square.diagonal().copy_(diagonal + ridge)
            factor, failed = torch.linalg.cholesky_ex(square)
            if int(failed):
                continue
            change = torch.cholesky_solve(product, factor).T
            tried = self._start + F.linear(self._x, change)
            if (found := self._loss(tried)) < loss:
                best, scores, loss = change, tried, found
        return best, scores

    def _network(self, scores: Tensor, width: int, seed: int) -> tuple[Tensor, Tensor]:
        """inner (W, X) and outer (E, W), trained to correct `scores`."""
        random = torch.Generator().manual_seed(seed)
        columns = self._x.shape[1]
        inner = (torch.randn(width, columns, generator=random) / columns**0.5).requires_grad_()
        outer = torch.zeros(len(self._router), width, requires_grad=True)
        x, base, target = self._x[self._study], scores[self._study], self._target[self._study]
        steps = _EPOCHS * -(-len(x) // _BATCH)
        trainer = torch.optim.AdamW([inner, outer], lr=_RATE, weight_decay=_DECAY)
        rate = torch.optim.lr_scheduler.OneCycleLR(trainer, _RATE, total_steps=steps)
        for _ in range(_EPOCHS):
            for batch in torch.randperm(len(x), generator=random).split(_BATCH):
                found = base[batch] + F.linear(F.silu(F.linear(x[batch], inner)), outer)
                loss = -(target[batch] * found.log_softmax(1)).sum(1).mean()
                trainer.zero_grad()
                loss.backward()
                trainer.step()
                rate.step()
        return inner, outer


class Training:
    """Teaches layer after layer while a model is packed; holds one layer's hidden states at a time.

    Args:
        layers: how many the model has. report: called with a layer's index before it is taught.

    Attributes:
        before: what a layer's MoE block was given (B, H), what it chose (B, K), and its norm's weights (H,); None at
            the first layer. learned: of each layer that was taught, see `learn`. Both may be set, to continue an
            interrupted training.
    """

    def __init__(self, layers: int, report: Callable[[int], None]) -> None:
        self._layers, self._report = layers, report
        self.before: tuple[Tensor, Tensor, Tensor] | None = None
        self.learned: list[tuple[Lookahead, float, float] | None] = []

    def reach(self, layer: int, hidden: Tensor, chosen: Tensor, router: Tensor, norm: Tensor) -> None:
        """The pass has come to `layer`, one after the other.

        Args:
            hidden: (B, H) given to its MoE block. chosen: (B, K) by its router (E, H).
            norm: (H,) weights of the norm before it.
        """
        if self.before is not None and len(self.learned) < layer:
            self._report(layer - 1)
            router = router.float()
            experts, size = router.shape
            given, choice, norm_before = self.before
            ratio = carry(norm_before, norm)
            lesson = Lesson(given, choice, F.linear(hidden.float(), router), chosen, router * ratio)
            self.learned.append(learn(lesson, width(layer - 1, self._layers, size, experts), seed=layer - 1))
        self.before = (hidden, chosen, norm) if layer + 1 < self._layers else None

    def tensors(self) -> dict[str, Tensor]:
        """What the profile stores; nothing unless every layer learned something.

        lookahead.NN.linear, .inner, .outer (see Lookahead), and lookahead.recall (L - 1, 2) float32: the learned
        predictor's and the router's on tokens held out.
        """
        learned = [found for found in self.learned if found is not None]
        if len(learned) < len(self.learned) or not learned:
            return {}
        stored = {RECALL: torch.tensor([[learned, router] for _, learned, router in learned])}
        for layer, (found, _, _) in enumerate(learned):
            for part in ("linear", "inner", "outer"):
                if (tensor := getattr(found, part)) is not None:
                    stored[name(layer, part)] = tensor
        return stored


def name(layer: int, part: str) -> str:
    """A predictor's tensor in the profile."""
    return f"{PREFIX}.{layer:02d}.{part}"


def to_tensors(found: tuple[Lookahead, float, float] | None) -> dict[str, Tensor]:
    """What `learn` returned, as tensors that a file can keep."""
    if found is None:
        return {"recall": torch.empty(0, dtype=torch.float64)}
    parts = {part: getattr(found[0], part) for part in ("linear", "inner", "outer")}
    kept = {part: tensor for part, tensor in parts.items() if tensor is not None}
    return {"recall": torch.tensor(found[1:], dtype=torch.float64), **kept}


def from_tensors(tensors: Mapping[str, Tensor]) -> tuple[Lookahead, float, float] | None:
    """The inverse of `to_tensors`."""
    if not tensors["recall"].numel():
        return None
    learned, router = tensors["recall"].tolist()
    return Lookahead(tensors["linear"], tensors.get("inner"), tensors.get("outer")), learned, router


def load(profile: Mapping[str, Tensor], layers: int, hidden: int, experts: int) -> list[Lookahead]:
    """The predictors of all layers but the last, as `Training.tensors` stored them; none if the profile has none.

    Raises:
        ValueError: a tensor is missing or of another dtype or shape; says which.
    """
    if RECALL not in profile:
        return []

    def part(layer: int, kind: str, rows: int | None, columns: int | None) -> Tensor:
        tensor = profile.get(name(layer, kind))
        wanted = (rows, columns)
        if (
            tensor is None
            or tensor.dtype != DTYPE
            or tensor.ndim != 2
            or not all(size in (None, have) for size, have in zip(wanted, tensor.shape, strict=True))
        ):
            have = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"{have} as {name(layer, kind)} instead of {DTYPE} {wanted}")
        return tensor

    found: list[Lookahead] = []
    inputs = hidden + experts + 1
    for layer in range(layers - 1):
        inner = outer = None
        if name(layer, "inner") in profile or name(layer, "outer") in profile:
            inner = part(layer, "inner", None, inputs)
            outer = part(layer, "outer", experts, len(inner))
        found.append(Lookahead(part(layer, "linear", experts, inputs), inner, outer))
    return found


def gains(profile: Mapping[str, Tensor], layers: int) -> list[bool]:
    """Whether each predictor that `load` returns named more experts than the router did, on tokens held out.

    Raises:
        ValueError: what was measured does not fit the model.
    """
    recall = profile[RECALL]
    if recall.shape != (layers - 1, 2):
        raise ValueError(f"{tuple(recall.shape)} as {RECALL} instead of {(layers - 1, 2)}")
    return [learned > router for learned, router in recall.tolist()]


def _part(tokens: int, blocks: Sequence[int]) -> Tensor:
    """(B,) bool: the tokens of some of the blocks that the text is cut in. Neighbours are alike, so no single ones."""
    block = torch.arange(tokens) * _BLOCKS // tokens
    return torch.isin(block, torch.tensor(blocks))


def recall(scores: Tensor, chosen: Tensor) -> float:
    """The share of the chosen experts (B, K) among the K of the highest scores (B, E)."""
    top = scores.topk(chosen.shape[1], dim=1).indices
    return float((top[:, :, None] == chosen[:, None, :]).any(dim=1).float().mean())
