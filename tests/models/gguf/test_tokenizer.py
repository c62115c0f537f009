"""A tokenizer from a GGUF file gives the ids of the one that the file was made of, on awkward texts too."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from floe_chat.models.errors import CheckpointError
from floe_chat.models.gguf import splits, tokenizer
from floe_chat.models.gguf.header import Value
from floe_chat.models.gguf.parts import Gguf
from floe_chat.models.gguf.shelf import GgufShelf
from floe_chat.models.tokenizer.chat_format import ChatFormat
from floe_chat.models.tokenizer.tokens import Tokens
from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ... import families
from ...helpers import TEMPLATE
from ..test_chat_tokens import TEXTS
from . import vocabulary
from .converting import convert

SAMPLE = [
    "The experts of a layer are chosen token by token, and what isn't chosen costs nothing.",
    "It's 3.14159 or 22/7; they're 1234567 and we've 42. Grüße, naïve café, ＡＢＣ, 日本語とкириллица!",
    "def f(x):\n    return x  # twice\n\n\tprint(f(3))\r\n",
] * 3
AWKWARD = [
    *TEXTS,
    *SAMPLE,
    "e\u0301 and \u00e9, ﬁne, \u2028 and \u00a0 x",
    "  leading, trailing  ",
    "<|im_start|>user\nhi<|im_end|>",
    "don't DON'T we'LL",
    "1 12 123 1234 12345 ½ ٣",
    "a_b-c::d && e||f ```x``` \\n",
    "🎉" * 3,
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<｜User｜>"]


def random_texts() -> list[str]:
    dice = random.Random(3)
    signs = "abcXYZ 0123 .,!?'\"-_\n\t\r äßé日本кир🎉\u0301\u200b▁" + "".join(map(chr, range(33, 48)))
    return ["".join(dice.choices(signs, k=dice.randint(1, 40))) for _ in range(300)]


def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary with merges."""
    learner: Any = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer: Any = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(SAMPLE, trainer)
    model = json.loads(learner.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def by_class(name: str) -> Tokenizer:
    import transformers

    vocab, merges = trained()
    return getattr(transformers, name)(vocab=vocab, merges=merges).backend_tokenizer


def by_hand(*parts: Any) -> Tokenizer:
    vocab, merges = trained()
    made: Any = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence([*parts])
    made.decoder = decoders.ByteLevel()
    return made


def with_scores() -> Tokenizer:
    """Of sentencepiece's kind: transformers' merges for a vocabulary and its scores."""

    from transformers.models.llama.tokenization_llama import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    pieces = ["▁", *sorted({sign for text in SAMPLE for sign in text.replace(" ", "▁")} - {"▁"})]
    words = sorted({f"▁{word}" for text in SAMPLE for word in text.split()}, key=len)
    pieces += sorted(
        {word[:end] for word in words for end in range(2, len(word) + 1)}, key=lambda piece: (len(piece), piece)
    )
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocab |= {piece: len(vocab) + number for number, piece in enumerate(dict.fromkeys(pieces))}
    scores = {piece: -float(number) for piece, number in vocab.items() if number > 256}
    made: Any = LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores)).backend_tokenizer
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = None  # as Mixtral's tokenizer.json has it
    return made


def pieces_with_scores(writer: GGUFWriter, source: Path, size: int) -> None:
    vocabulary.pieces(writer, source, size, scores=lambda token, number: -float(number))


DIGITS = pre_tokenizers.Digits(individual_digits=True)
KINDS: dict[str, tuple[Callable[[], Tokenizer], Callable[..., None]]] = {
    "gpt-2": (partial(by_class, "GPT2Tokenizer"), partial(vocabulary.byte_level, pre="gpt-2")),
    "qwen2": (partial(by_class, "Qwen2Tokenizer"), partial(vocabulary.byte_level, pre="qwen2")),
    "refact": (
        partial(by_hand, DIGITS, pre_tokenizers.ByteLevel(add_prefix_space=False)),
        partial(vocabulary.byte_level, pre="refact"),
    ),
    "pieces": (with_scores, pieces_with_scores),
}


def with_special(made: Tokenizer) -> Tokenizer:
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.add_tokens([AddedToken("<think>", normalized=False)])
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.make("mixtral", tmp_path_factory.mktemp("source"))


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_original(kind: str, source: Path, tmp_path: Path) -> None:
    make, write = KINDS[kind]
    theirs = with_special(make())
    folder = tmp_path / "theirs"
    folder.mkdir()
    theirs.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))

    def written(writer: GGUFWriter, _source: Path, _size: int) -> None:
        write(writer, folder, theirs.get_vocab_size() + 3)  # the matrix has some rows more

    shelf = GgufShelf(convert(source, tmp_path / "tiny.gguf", tokenizer=written), tmp_path / "made")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert shelf.small(name) == tmp_path / "made" / name
    ours = Tokens(tmp_path / "made")
    for text in [*AWKWARD, *random_texts()]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids, text
        assert ours.decoder().push(ids) == Tokens(folder).decoder().push(ids)
    assert ours.special.items() >= {token: theirs.token_to_id(token) for token in SPECIAL}.items()
    chats = [ChatFormat(place) for place in (tmp_path / "made", folder)]
    talk = [{"role": "user", "content": "What is an expert?"}]
    assert chats[0].encode(talk) == chats[1].encode(talk) and chats[0].stop_ids == chats[1].stop_ids


@pytest.mark.parametrize(
    "pre",
    [
        *("llama-bpe", "qwen35", "deepseek-llm", "deepseek-coder", "deepseek-v3", "gpt-4o", "glm4"),
        *("afmoe", "exaone-moe", "hunyuan", "kimi-k2", "laguna"),
    ],
)
def test_text_comes_back_however_it_is_split(pre: str, tmp_path: Path) -> None:
    vocab, merges = trained()
    gguf = of({"tokenizer.ggml.tokens": [*vocab], "tokenizer.ggml.merges": [" ".join(merge) for merge in merges]}, pre)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.file(gguf, "tokenizer.json") or b"")
    made: Any = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*AWKWARD, *random_texts()]:
        ids = made.encode(text, add_special_tokens=False).ids
        assert made.decode(ids, skip_special_tokens=False) == (
            made.normalizer.normalize_str(text) if made.normalizer else text
        )


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("afmoe", ["a", "1", "234", "567", "Ġb"]),
        ("exaone-moe", ["aĠb"]),
        ("hunyuan", ["a", "1", "2"]),
        ("kimi-k2", ["Aa", "123"]),
    ],
)
def test_words_are_those_of_the_published_tokenizer(pre: str, words: list[str]) -> None:
    text = "".join(words).replace("Ġ", " ")
    assert [word for word, _ in splits.splitter(pre).pre_tokenize_str(text)] == words


def of(values: dict[str, Value], pre: str = "gpt-2") -> Gguf:
    usual: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "general.architecture": "llama",
    }
    return Gguf(Path("tiny.gguf"), {**usual, **values}, {})


SAID: dict[str, tuple[dict[str, Value], str]] = {
    "no tokens": ({}, "no tokens"),
    "tokens that are numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "not a list of texts"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a", "a"]}, "token twice"),
    "kinds for some": ({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [1]}, "token_type"),
    "an unknown model": ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "rwkv"}, "of the type 'rwkv'"),
    "an unknown way": ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "x\x1b[2J"}, "which is not known"),
    "a merge of one": ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["a"]}, "no pair"),
    "a merge of strangers": ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["x y"]}, "x"),
    "no scores": ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "llama"}, "scores"),
}


@pytest.mark.parametrize(("values", "words"), SAID.values(), ids=SAID)
def test_a_bad_vocabulary_is_refused(values: dict[str, Value], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        tokenizer.file(of(values), "tokenizer.json")
    assert "\x1b" not in str(caught.value)


def test_a_shelf_says_whose_tokenizer_it_is(source: Path, tmp_path: Path) -> None:
    write = partial(vocabulary.byte_level, pre="nobody's")
    shelf = GgufShelf(convert(source, tmp_path / "tiny.gguf", tokenizer=write), tmp_path / "made")
    with pytest.raises(CheckpointError, match=r"The tokenizer of tiny\.gguf cannot be read"):
        shelf.small("tokenizer.json")


def test_ids_may_be_missing_between_others(capfd: pytest.CaptureFixture[str]) -> None:
    vocab, merges = trained()
    tokens = [*vocab, "[PAD400]", "[PAD401]", "<end>"]
    values: dict[str, Value] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(vocab) + [5, 5, 3],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
    }
    made = Tokenizer.from_str((tokenizer.file(of(values), "tokenizer.json") or b"").decode())
    assert made.token_to_id("<end>") == len(vocab) + 2 and made.token_to_id("[PAD400]") is None
    assert made.encode("ab<end>", add_special_tokens=False).ids[-1] == len(vocab) + 2
    assert made.decode([len(vocab)]) == "" and capfd.readouterr() == ("", "")


def test_ends_and_sampling_are_those_of_the_file() -> None:
    values: dict[str, Value] = {f"tokenizer.ggml.{kind}_token_id": number for number, kind in enumerate(("eos", "eot"))}
    gguf = of({**values, "general.sampling.temp": 0.7, "general.sampling.top_k": 20})
    fields = json.loads(tokenizer.file(gguf, "generation_config.json") or b"")
    assert fields == {"eos_token_id": [0, 1], "temperature": 0.7, "top_k": 20, "do_sample": True}
    assert tokenizer.file(gguf, "chat_template.jinja") is None and tokenizer.file(gguf, "other") is None
