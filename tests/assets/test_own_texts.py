"""Models of one's own texts: what is kept out is never trained on."""

from __future__ import annotations

from itertools import islice
from pathlib import Path


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
