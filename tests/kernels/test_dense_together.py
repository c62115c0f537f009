"""The step of a token of each of some texts, by two threads: each is what it is alone, by one, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from floe_chat.kernels.cpu.native_step import NativeStep, Place, placed

from .test_dense_step import CAPACITY, SIZES, Sizes, every_size, make_input, make_layer


@every_size
@pytest.mark.usefixtures("isa", "two_threads")
def test_texts_together_are_each_alone(sizes: Sizes) -> None:
    layer, all_positions = make_layer(sizes), (200, 0, CAPACITY - 1, 64)
    if layer.router is not None:
        layer = replace(layer, router=replace(layer.router, scores=torch.empty(4, sizes.experts)))
    step, made = NativeStep(layer), [(make_input(sizes, position), position) for position in all_positions]
    for texts, added in ((1, True), (3, False), (4, True)):
        inputs = [(x, more, rope, kv.clone()) for (x, more, rope, kv), _ in made[:texts]]
        given = list(zip(inputs, all_positions, strict=False))
        torch.set_num_threads(1)
        alone = [step(x, more if added else None, rope, kv.clone(), at) for (x, more, rope, kv), at in given]
        scores = None if step.scores is None else step.scores[:1].clone()
        x, more = (torch.cat(part) for part in list(zip(*inputs, strict=True))[:2])
        # This layer is the last of two, of which the first has keys and values too.
        where = placed(2 * [step], [Place(rope, [torch.zeros_like(kv), kv], at) for (_, _, rope, kv), at in given])
        torch.set_num_threads(2)
        together = step.together(1, x, more if added else None, where)
        for row, one in enumerate(alone):
            assert torch.equal(together.stream[row], one.stream[0]), "to the last bit"
            assert torch.equal(together.hidden[row], one.hidden[0])
            for part, own in zip(together.routed, one.routed, strict=True):
                assert torch.equal(part[row], own[0])
        if scores is not None and step.scores is not None:
            assert torch.equal(step.scores[texts - 1], scores[0])
        for ((_, _, rope, kv), position), ((*_, kept), _) in zip(given, made, strict=False):
            assert torch.equal(kv[:position].nan_to_num(9), kept[:position].nan_to_num(9))
            assert not torch.equal(kv[position].nan_to_num(9), kept[position].nan_to_num(9)) and len(rope)


@pytest.mark.usefixtures("isa")
def test_more_texts_than_fit_are_refused() -> None:
    sizes = SIZES["small"]
    step, (x, _, rope, kv) = NativeStep(make_layer(sizes)), make_input(sizes, 2)
    where = placed([step], 5 * [Place(rope, [kv], 2)])
    step.scores = None
    with pytest.raises(ValueError):
        step.together(0, x.expand(5, -1).contiguous(), None, where)
    with pytest.raises(ValueError):
        step.together(0, x, None, placed([step], 2 * [Place(rope, [kv], 2)]))
