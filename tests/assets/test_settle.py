"""After training the demo model learns to bear rounding: always alike."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch


def test_all_weights_learn_on_and_always_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from floe_chat.assets.demo.make import settle
    from floe_chat.assets.demo.make.shapes import demo, trained
    from floe_chat.assets.demo.make.train import save
    from floe_chat.assets.demo.make.vocabulary import build_tokenizer
    from transformers import MixtralForCausalLM

    threads = torch.get_num_threads()
    monkeypatch.setattr(settle, "STEPS", 2)
    monkeypatch.setattr(settle, "keep_freed_memory", lambda: None)  # this process goes on with other tests
    tokenizer = build_tokenizer()
    config = demo(tokenizer)
    config.num_hidden_layers, config.intermediate_size = 2, 64
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
