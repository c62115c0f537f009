"""The learned predictor: what it can learn, what it cannot, and how a pack keeps it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from floe_chat.engine.loader import load
from floe_chat.engine.paper.predictors import watch
from floe_chat.models.errors import PackError, UsageError
from floe_chat.models.pack import learned_predictor
from floe_chat.models.pack.learned_predictor import Lesson, Lookahead, Training, carry, learn
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.pack.tensor_file import write_tensors
from floe_chat.models.packing import pack_experts
from floe_chat.models.packing.pack import EXACT
from safetensors.torch import load_file
from torch import Tensor

from ..helpers import calibration_tokens, edit_tensors, make_checkpoint, make_pack, reference_model, reseal

H, E, K = 24, 6, 2


def lesson(tokens: int, seed: int, kind: str) -> Lesson:
    """Tokens whose next experts follow from a rule that the next router does not know."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, H, generator=random)
    chosen = torch.rand(tokens, E, generator=random).topk(K).indices
    rule = torch.Generator().manual_seed(99)  # the same for every seed
    if kind == "linear":
        logits = hidden @ torch.randn(H, E, generator=rule)
    elif kind == "history":
        logits = torch.zeros(tokens, E).scatter_(1, (chosen + 1) % E, 1.0) * torch.tensor([3.0])
        logits += 0.01 * torch.randn(tokens, E, generator=random)
    elif kind == "network":
        logits = hidden[:, :E].abs()
    else:
        logits = torch.randn(tokens, E, generator=random)
    router = torch.randn(E, H, generator=rule)
    return Lesson(hidden, chosen, logits, logits.topk(K).indices, router)


def recall(scores: Tensor, chosen: Tensor) -> float:
    """Token by token, as sets."""
    named = scores.topk(chosen.shape[1]).indices.tolist()
    return sum(len(set(a) & set(b)) for a, b in zip(named, chosen.tolist(), strict=True)) / chosen.numel()


def on_new_text(found: Lookahead, kind: str) -> tuple[float, float]:
    """Recall of a predictor and of the router on tokens of the same rule that nobody has seen."""
    new = lesson(1000, 12345, kind)
    scores = found.to("cpu", torch.float32).scores(new.hidden, new.chosen)
    return recall(scores, new.following), recall(F.linear(new.hidden, new.router), new.following)


@pytest.mark.parametrize("kind", ["linear", "history"])
def test_it_learns_what_the_router_does_not_know(kind: str) -> None:
    result = learn(lesson(2000, 1, kind), 0, seed=0)
    assert result is not None
    found, learned, router = result
    assert found.inner is None and found.outer is None
    new, new_router = on_new_text(found, kind)
    assert new > 0.95 > 0.6 > new_router
    assert abs(learned - new) < 0.06 and abs(router - new_router) < 0.06, "what is reported is not what it does"


def test_a_network_learns_what_no_linear_map_can() -> None:
    plain, wide = (learn(lesson(3000, 2, "network"), w, seed=0) for w in (0, 32))
    assert plain is not None and wide is not None
    assert wide[0].inner is not None and wide[0].inner.shape == (32, H + E + 1)
    assert on_new_text(wide[0], "network")[0] > on_new_text(plain[0], "network")[0] + 0.05


def test_a_network_that_helps_nothing_is_left_out() -> None:
    result = learn(lesson(2000, 3, "linear"), 32, seed=0)
    assert result is not None and result[0].inner is None


def test_the_reported_recall_is_of_tokens_that_it_did_not_learn_from() -> None:
    given = lesson(1600, 4, "linear")
    for block in (7, 15):
        held = slice(block * 100, (block + 1) * 100)
        given.following[held] = (-given.logits[held]).topk(K).indices
    result = learn(given, 0, seed=0)
    assert result is not None
    assert result[1] < 0.1, "the tokens that follow another rule were learned from, or not asked about"
    assert on_new_text(result[0], "linear")[0] > 0.95


def test_text_without_a_rule_teaches_nothing() -> None:
    result = learn(lesson(400, 4, "chance"), 64, seed=0)
    assert result is not None
    assert abs(result[1] - K / E) < 0.15 and abs(on_new_text(result[0], "chance")[0] - K / E) < 0.05


def test_the_same_lesson_gives_the_same_predictor_also_in_inference_mode() -> None:
    one = learn(lesson(800, 5, "network"), 16, seed=3)
    with torch.inference_mode():
        two = learn(lesson(800, 5, "network"), 16, seed=3)
    assert one is not None and two is not None
    assert one[1:] == two[1:]
    for part in ("linear", "inner", "outer"):
        assert torch.equal(getattr(one[0], part), getattr(two[0], part))


def test_a_router_that_is_right_stays() -> None:
    given = lesson(500, 6, "linear")
    logits = F.linear(given.hidden, given.router)
    result = learn(Lesson(given.hidden, given.chosen, logits, logits.topk(K).indices, given.router), 16, seed=0)
    assert result is not None
    assert result[1] > 0.97 and result[2] == 1.0


def test_inputs_that_never_vary_and_huge_ones_give_finite_weights() -> None:
    given = lesson(800, 7, "linear")
    given.hidden[:, 3], given.hidden[:, 4] = 0.0, 1e-30
    given.hidden[:, 5] *= 1e5
    result = learn(given, 16, seed=0)
    assert result is not None and bool(result[0].linear.isfinite().all())


def test_too_little_text_and_values_that_are_no_numbers_teach_nothing() -> None:
    assert learn(lesson(63, 8, "linear"), 0, seed=0) is None
    assert learn(lesson(64, 8, "linear"), 0, seed=0) is not None
    for part in ("hidden", "logits"):
        given = lesson(500, 8, "linear")
        getattr(given, part)[17, 2] = torch.nan
        assert learn(given, 0, seed=0) is None


def test_carrying_over_norms_survives_weights_of_zero() -> None:
    ratio = carry(torch.tensor([2.0, 0.0, 0.0, 4.0]), torch.tensor([1.0, 3.0, 0.0, -2.0]))
    assert ratio.tolist() == [0.5, 0.0, 0.0, -0.5]


def test_layers_that_learned_nothing_leave_the_profile_without_predictors() -> None:
    told: list[int] = []
    router, norm = torch.randn(E, H), torch.ones(H)
    training = Training(3, told.append)
    for layer, tokens in enumerate((200, 200, 200)):
        training.reach(layer, torch.randn(tokens, H), torch.rand(tokens, E).topk(K).indices, router, norm)
    assert told == [0, 1] and len(training.tensors()) == 3
    training = Training(3, told.append)
    for layer in range(3):
        training.reach(layer, torch.randn(20, H), torch.rand(20, E).topk(K).indices, router, norm)
    assert training.tensors() == {}


@pytest.mark.parametrize("tokens", [20, 3000], ids=["nothing", "network"])
def test_what_was_learned_survives_being_kept(tmp_path: Path, tokens: int) -> None:
    found = learn(lesson(tokens, 2, "network"), 32, seed=0)
    write_tensors(tmp_path / "kept.safetensors", learned_predictor.to_tensors(found))
    again = learned_predictor.from_tensors(load_file(tmp_path / "kept.safetensors"))
    if found is None or again is None:
        assert found is again is None and tokens == 20
        return
    assert again[1:] == found[1:] and again[0].inner is not None
    assert all(torch.equal(getattr(again[0], part), getattr(found[0], part)) for part in ("linear", "inner", "outer"))


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_packing_teaches_each_layer_with_what_transformers_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Layer l's input and choice, layer l + 1's scores and choice, from the model's own pass."""
    source = make_checkpoint(tmp_path / "source", family=family, layers=3)
    lessons: list[Lesson] = []
    original = learned_predictor.learn

    def float32(_device: torch.device) -> torch.dtype:
        return torch.float32

    def note(given: Lesson, width: int, seed: int) -> Any:
        lessons.append(given)
        return original(given, width, seed)

    monkeypatch.setattr(learned_predictor, "learn", note)
    monkeypatch.setattr(pack_experts, "fast_type", float32)  # as transformers computes
    make_pack(source, tmp_path / "p", EXACT)
    model = reference_model(source)
    with torch.inference_mode():
        seen, _ = watch(model, calibration_tokens())
    assert len(lessons) == 2
    for layer, taught in enumerate(lessons):
        now, then = seen[layer], seen[layer + 1]
        torch.testing.assert_close(taught.hidden, now.hidden, rtol=1e-3, atol=1e-4)
        assert torch.equal(taught.chosen, now.chosen) and torch.equal(taught.following, then.chosen)
        router = model.model.layers[layer + 1].mlp.gate.weight.detach()
        torch.testing.assert_close(taught.logits, F.linear(then.hidden, router), rtol=1e-3, atol=1e-3)


def test_a_pack_keeps_its_predictors(tiny_pack: Path) -> None:
    packed = PackedModel.open(tiny_pack)
    a = packed.manifest.architecture
    assert packed.has_lookahead()
    found = packed.lookahead()
    assert [tuple(layer.linear.shape) for layer in found] == [(a.experts, a.hidden + a.experts + 1)] * (a.layers - 1)
    shares = packed.profile()[learned_predictor.RECALL]
    assert shares.shape == (a.layers - 1, 2) and bool(((shares >= 0) & (shares <= 1)).all())


@pytest.fixture
def copy(tiny_pack: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pack, tmp_path / "copy"))


def test_a_pack_without_predictors_works_and_says_so_when_asked_for_them(copy: Path) -> None:
    edit_tensors(copy, lambda name, tensor: None if name.startswith(learned_predictor.PREFIX) else tensor)
    reseal(copy)
    packed = PackedModel.open(copy)
    assert not packed.has_lookahead()
    load(copy, None, "cpu", lambda _step, _share: None)
    with pytest.raises(UsageError, match="no learned predictor") as caught:
        packed.lookahead()
    assert "gate" in caught.value.hint and "pack" in caught.value.hint


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype", "half-a-network", "no-matrix"])
def test_predictors_that_do_not_fit_are_damage(copy: Path, damage: str) -> None:
    name = learned_predictor.name(0, "linear")

    def change(found: str, tensor: Tensor) -> Tensor | None:
        if found != name:
            return tensor
        if damage == "missing":
            return None
        return {"shape": tensor[:, 1:].contiguous(), "dtype": tensor.float(), "no-matrix": tensor[0].clone()}[damage]

    if damage != "half-a-network":
        edit_tensors(copy, change)
    else:
        keep_half_a_network(copy / "profile.safetensors")
    reseal(copy)
    packed = PackedModel.open(copy)
    with pytest.raises(PackError, match="damaged") as caught:
        packed.lookahead()
    assert learned_predictor.PREFIX in caught.value.cause


def keep_half_a_network(path: Path) -> None:
    """Of the first layer's, whether or not there was one."""
    from safetensors.torch import load_file, save_file

    inner, outer = (learned_predictor.name(0, part) for part in ("inner", "outer"))
    kept = {name: tensor for name, tensor in load_file(path).items() if name != inner}
    save_file(kept | {outer: torch.zeros(4, 8, dtype=torch.bfloat16)}, path, {"format": "pt"})
