"""Predictors, and the counting of what they got right."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from floe_chat.engine.offload import predictor
from floe_chat.engine.offload.predictor import GatePredictor, LearnedPredictor, PartialPredictor, Predictor
from floe_chat.engine.paper.predictors import through_attention, watch
from floe_chat.models.errors import PackError, UsageError
from floe_chat.models.pack import learned_predictor
from floe_chat.models.pack.learned_predictor import Lookahead
from floe_chat.models.pack.packed_model import PackedModel
from torch import Tensor

from ..helpers import calibration_tokens, edit_tensors, make_checkpoint, reference_model, reseal
from .driver import open_model


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt() * weight


def test_the_gate_predictor_is_exact_where_the_stream_does_not_change() -> None:
    random = torch.Generator().manual_seed(int(torch.randint(1 << 30, ())))
    layers, hidden, experts = 4, 32, 5
    stream = torch.randn(7, hidden, generator=random)
    norms = [torch.rand(hidden, generator=random) + 0.2 for _ in range(layers)]
    routers = [torch.randn(experts, hidden, generator=random) for _ in range(layers)]
    carries = [learned_predictor.carry(a, b) for a, b in itertools.pairwise(norms)]
    gate: Predictor = GatePredictor(routers, carries)
    for layer in range(layers - 1):
        given = rms_norm(stream, norms[layer])
        scores = gate.experts(layer, given, torch.zeros(7, 2, dtype=torch.int64), gate.guess(layer, given, None))
        expected = F.linear(rms_norm(stream, norms[layer + 1]), routers[layer + 1])
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


def test_the_learned_predictor_adds_the_parts_of_its_layer() -> None:
    torch.manual_seed(int(np.random.default_rng().integers(1 << 30)))
    layers = [
        Lookahead(torch.randn(4, 16 + 4 + 1), torch.randn(6, 16 + 4 + 1), torch.randn(4, 6)),
        Lookahead(torch.randn(4, 16 + 4 + 1)),
    ]
    hidden, chosen = torch.randn(3, 16), torch.tensor([[0, 2], [3, 1], [2, 3]])
    for index, layer in enumerate(layers):
        scores = LearnedPredictor([], [], layers).experts(index, hidden, chosen, hidden)
        for token in range(3):
            history = torch.zeros(4)
            history[chosen[token]] = 1
            x = torch.cat([hidden[token], history, torch.ones(1)])
            expected = layer.linear @ x
            if layer.inner is not None and layer.outer is not None:
                expected = expected + layer.outer @ F.silu(layer.inner @ x)
            torch.testing.assert_close(scores[token], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recall", [(0.5, 0.6), (0.6, 0.5), (0.5, 0.5), (0.6, 0.4), (0.3, 0.4)], ids=str)
def test_a_layer_where_the_router_did_better_has_the_router(
    tiny_pack: Path, tmp_path: Path, recall: tuple[float, float]
) -> None:
    copy = Path(shutil.copytree(tiny_pack, tmp_path / "copy"))
    edit_tensors(copy, lambda name, tensor: torch.tensor([recall]) if name == learned_predictor.RECALL else tensor)
    reseal(copy)
    loaded, packed = open_model(tiny_pack), PackedModel.open(copy)
    hidden, chosen = torch.randn(2, 64), torch.tensor([[0, 1], [3, 2]])
    auto, learned, gate = (predictor.make(name, loaded.model, packed) for name in ("auto", "learned", "gate"))
    scores = {made: made.experts(0, hidden, chosen, made.guess(0, hidden, None)) for made in (auto, learned, gate)}
    assert not torch.equal(scores[learned], scores[gate])
    assert torch.equal(scores[auto], scores[learned if recall[0] > recall[1] else gate])
    # Through attention, only where the router found less than half of them.
    partial = predictor.make("partial", loaded.model, packed, lambda _layer, _output: 2 * hidden)
    named = partial.experts(0, hidden, chosen, partial.guess(0, hidden, None))
    by_router = F.linear(2 * hidden, loaded.model.model.layers[1].mlp.gate.weight)
    assert torch.equal(named, scores[learned] if recall == (0.6, 0.4) else by_router)

    edit_tensors(copy, lambda name, tensor: tensor[:, :1] if name == learned_predictor.RECALL else tensor)
    reseal(copy)
    with pytest.raises(PackError, match="recall"):
        predictor.make("auto", loaded.model, PackedModel.open(copy))
    assert predictor.make("learned", loaded.model, PackedModel.open(copy)).name == "learned"


def test_a_pack_gets_the_learned_predictor_if_it_has_it(tiny_pack: Path, tmp_path: Path) -> None:
    loaded = open_model(tiny_pack)
    hidden, chosen = torch.randn(2, 64), torch.tensor([[0, 1], [3, 2]])
    for name, expected in (("auto", "learned"), ("learned", "learned"), ("gate", "gate")):
        made = predictor.make(name, loaded.model, loaded.packed)
        assert made.name == expected
        assert made.experts(0, hidden, chosen, made.guess(0, hidden, None)).shape == (2, 4)
    with pytest.raises(UsageError, match="oracle") as caught:
        predictor.make("oracle", loaded.model, loaded.packed)
    assert "gate" in caught.value.hint
    with pytest.raises(UsageError, match="partial"):
        predictor.make("partial", loaded.model, loaded.packed)
    named = predictor.make("partial", loaded.model, loaded.packed, lambda _layer, _output: hidden)
    guess = named.guess(0, torch.zeros(2, 64), None)
    expected = F.linear(hidden, loaded.model.model.layers[1].mlp.gate.weight)
    assert torch.equal(named.experts(0, torch.zeros(2, 64), chosen, guess), expected)

    def ahead(_layer: int, _output: Tensor | None) -> Tensor:
        return hidden

    for name, by, expected in (
        ("auto", ahead, ["learned", "partial"]),
        ("auto", None, ["learned"]),
        ("gate", ahead, ["gate"]),
    ):
        assert [one.name for one in predictor.candidates(name, loaded.model, loaded.packed, by)] == expected

    old = Path(shutil.copytree(tiny_pack, tmp_path / "old"))
    edit_tensors(old, lambda name, tensor: None if name.startswith(learned_predictor.PREFIX) else tensor)
    reseal(old)
    assert predictor.make("auto", loaded.model, PackedModel.open(old)).name == "gate"
    with pytest.raises(UsageError, match="no learned predictor"):
        predictor.make("learned", loaded.model, PackedModel.open(old))


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_the_partial_predictor_is_exact_once_all_output_is_known(tmp_path: Path, family: str) -> None:
    model = reference_model(make_checkpoint(tmp_path / "m", family=family, layers=3))
    with torch.inference_mode():
        seen, rope = watch(model, calibration_tokens())
        routers = [layer.mlp.gate.weight for layer in model.model.layers]

        def ahead(layer: int, output: Tensor | None) -> Tensor:
            stream = seen[layer].residual
            stream = stream if output is None else stream + output.view_as(stream)
            return through_attention(model.model.layers[layer + 1], seen[layer + 1].stream, stream, rope)

        partial = PartialPredictor(routers, ahead)
        for layer in (0, 1):
            now, then = seen[layer], seen[layer + 1]
            guess = partial.guess(layer, now.hidden, (then.stream - now.residual).flatten(0, 1))
            torch.testing.assert_close(guess, then.hidden, rtol=1e-3, atol=1e-4)
            scores = partial.experts(layer, now.hidden, now.chosen, guess)
            torch.testing.assert_close(scores, F.linear(then.hidden, routers[layer + 1]), rtol=1e-3, atol=1e-3)
            unknown = partial.experts(layer, now.hidden, now.chosen, partial.guess(layer, now.hidden, None))
            assert unknown.shape == scores.shape and not torch.allclose(unknown, scores, rtol=1e-2, atol=1e-2)
