"""The demo model: what it is taught, what is kept out, how it settles and goes on after an interruption."""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from floe_chat.assets.demo.make.corpus import DialogueMaker, HeldOut
from floe_chat.assets.demo.make.facts import read_facts, read_first_messages, read_heldout, read_scope, read_templates
from floe_chat.assets.demo.make.progress import TrainingProgress
from torch import nn


def same(question: str) -> str:
    """A question without what people leave out."""
    return question.lower().rstrip("?.! ")


def questions() -> Iterator[tuple[str, str]]:
    """Every question that is taught, with its answer."""
    patterns = read_templates()
    for fact in read_facts():
        for form, phrases in fact.forms.items():
            templates = ["{x}"] if form == "q" else patterns[form]
            if form == "do" and "key" in fact.forms:
                templates = [*templates, *patterns["key_do"]]
            yield from ((template.replace("{x}", x), fact.answer) for template in templates for x in phrases)
    for topic in read_scope():
        for template in topic["templates"]:
            yield from ((template.replace("{x}", x), topic["answers"][0]) for x in topic["x"])


def test_a_question_has_one_answer() -> None:
    answers: defaultdict[str, set[str]] = defaultdict(set)
    for question, answer in questions():
        answers[same(question)].add(answer)
    assert {question: given for question, given in answers.items() if len(given) > 1} == {}
    by_name = {fact.name: fact.answer for fact in read_facts()}
    for message, name in read_first_messages().items():
        assert answers[same(message)] <= {by_name[name]}, message


def test_first_messages_are_taught() -> None:
    messages = read_first_messages()
    held_out = HeldOut()
    assert len(messages) >= 100 and [message for message in messages if message in held_out] == []
    maker = DialogueMaker(random.Random(3))
    seen = {maker.dialogue()[0].content for _ in range(2_000)}
    assert len(seen & set(messages)) > len(messages) / 4


def test_expected_words_can_come() -> None:
    taught = {answer.lower() for _, answer in questions()}
    taught |= {text.lower() for fact in read_facts() for text in fact.follow_ups.values()}
    patterns = read_templates()
    taught |= {patterns[kind][0].lower() for kind in ("after_declining", "no_more", "no_why", "no_example")}
    for check in read_heldout():
        wanted = [expected.lower().split("|") for expected in check.get("expect", [])]
        assert wanted
        assert any(all(any(a in text for a in either) for either in wanted) for text in taught), check


def test_what_is_kept_out_is_never_trained_on(tmp_path: Path) -> None:
    from floe_chat.assets.demo.make.own_texts import OwnTexts
    from floe_chat.assets.demo.make.vocabulary import build_tokenizer

    (tmp_path / "tests").mkdir()
    for number in range(120):
        (tmp_path / f"part{number}.py").write_text(f"# the word{number} is here\n" * 12, encoding="utf-8")
    (tmp_path / "tests" / "test_part.py").write_text("# left out\n", encoding="utf-8")
    (tmp_path / "notes.md").write_text("# left out\n", encoding="utf-8")
    texts = OwnTexts(tmp_path)
    taught, kept = texts.read(held_out=False), texts.read(held_out=True)
    assert len(taught) + len(kept) == 120 and 0 < len(kept) < 20
    tokenizer = build_tokenizer(taught)
    seen = ""
    for ids, wanted in islice(texts.batches(tokenizer, 3), 12):
        assert ids.shape == wanted.shape and ids.numel() - len(ids) == 1024 and bool(wanted.all())
        seen += str(tokenizer.decode(ids.flatten().tolist()))
    words = {text.split()[2] for text in taught}
    assert words & set(seen.split())
    assert not {text.split()[2] for text in kept} & set(seen.split())


def test_the_same_seed_gives_the_same_rows(tmp_path: Path) -> None:
    from floe_chat.assets.demo.make.own_texts import OwnTexts
    from floe_chat.assets.demo.make.vocabulary import build_tokenizer

    for number in range(30):
        (tmp_path / f"part{number}.py").write_text(f"part {number} of thirty\n" * 40, encoding="utf-8")
    texts = OwnTexts(tmp_path)
    tokenizer = build_tokenizer(texts.read(held_out=False))
    one, again, other = (next(texts.batches(tokenizer, seed))[0] for seed in (1, 1, 2))
    assert one.equal(again) and not one.equal(other)


def test_all_weights_learn_on_and_always_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from floe_chat.assets.demo.make import settle
    from floe_chat.assets.demo.make.corpus import tokenizer_texts
    from floe_chat.assets.demo.make.shapes import demo, trained
    from floe_chat.assets.demo.make.train import save
    from floe_chat.assets.demo.make.vocabulary import build_tokenizer
    from transformers import MixtralForCausalLM

    threads = torch.get_num_threads()
    monkeypatch.setattr(settle, "STEPS", 2)
    monkeypatch.setattr(settle, "keep_freed_memory", lambda: None)  # this process goes on with other tests
    tokenizer = build_tokenizer(tokenizer_texts()[::20])
    config = demo(tokenizer)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads = 1, 64, 64, 2
    torch.manual_seed(0)
    save(MixtralForCausalLM(config), tokenizer, tmp_path / "one")
    before, _ = trained(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    try:
        for name in ("one", "two"):
            settle.settle(tmp_path / name, seed=3)
    finally:
        torch.set_num_threads(threads)
    after, _ = trained(tmp_path / "one")
    for name, was in before.named_parameters():
        now = after.get_parameter(name)
        # No farther than the rate allows, however far off weights were for a step; of norms 16 bits do not show it.
        assert (was - now).abs().max() < 0.01 and (was.ndim == 1 or not torch.equal(was, now)), name
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_errors_are_those_of_rounding() -> None:
    from floe_chat.assets.demo.make import settle

    weights = torch.randn(5, 2 * settle.GROUP, generator=torch.Generator().manual_seed(0))
    step = (weights.view(-1, settle.GROUP).amax(1) - weights.view(-1, settle.GROUP).amin(1)) / (2**settle.BITS - 1)
    found = settle.rounding(weights).view(-1, settle.GROUP)
    assert (found.abs() <= step[:, None] / 2).all()
    torch.testing.assert_close(found.square().mean(1).sqrt() / step, torch.full((10,), 12**-0.5), rtol=0.3, atol=0)


PLAN = "steps 6, seed 0"


def made() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.SiLU(), nn.Linear(7, 3, bias=False))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95), fused=True)


def train(model: nn.Module, optimizer: torch.optim.AdamW, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def test_the_rest_gives_what_the_whole_gives(tmp_path: Path) -> None:
    whole, optimizer = made()
    train(whole, optimizer, range(6))
    half, optimizer = made()
    train(half, optimizer, range(3))
    TrainingProgress(tmp_path / "new" / "state.safetensors", half, optimizer, PLAN).keep(3)
    rest, optimizer = made()
    kept = TrainingProgress(tmp_path / "new" / "state.safetensors", rest, optimizer, PLAN)
    assert kept.restore() == 3
    train(rest, optimizer, range(3, 6))
    for ours, theirs in zip(rest.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    kept.remove()
    assert kept.restore() == 0 and not [*(tmp_path / "new").iterdir()]


@pytest.mark.parametrize("damage", ["plan", "cut", "none"])
def test_another_state_is_not_gone_on_with(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "state.safetensors"
    model, optimizer = made()
    train(model, optimizer, range(2))
    if damage != "none":
        TrainingProgress(file, model, optimizer, "another" if damage == "plan" else PLAN).keep(2)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    fresh, optimizer = made()
    before = [parameter.clone() for parameter in fresh.parameters()]
    assert TrainingProgress(file, fresh, optimizer, PLAN).restore() == 0
    assert all(torch.equal(a, b) for a, b in zip(before, fresh.parameters(), strict=True))
