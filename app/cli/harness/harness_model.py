"""A loaded pack in the form that EleutherAI's lm-evaluation-harness expects: text in, log-likelihoods and answers out.

Scores are those of the harness's own class for transformers models (`lm_eval.models.huggingface.HFLM`), token for
token: the same encoding, the same start token, the same truncation from the left. A test compares the two. Only the
computation differs: many short requests go through the model in one pass, and a long one in several, so that an
expert's weights are read for many tokens at once and logits never take more than `CHUNK` rows of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from ....engine.decoder.finite_check import first_nonfinite
from ....engine.decoder.kv_cache import LibraryStore
from ....engine.events import Sampling
from ....engine.generate import KVCache, generate
from ....engine.loader import LoadedModel
from ....engine.quality.references import pack_logits
from ....models.errors import FloeError, PackError, UsageError

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

CHUNK = 1024  # tokens of one pass: bounds activations, and logits to 131 MB for a vocabulary of 32000
ANSWER_TOKENS = 256  # the harness's own default for tasks that name no length

Told = Callable[[str], None]


@dataclass(slots=True)
class _Row:
    """Tokens to read, without the last one, and the requests for the likelihood of their endings."""

    ids: tuple[int, ...]
    requests: list[tuple[int, list[int]]] = field(default_factory=list[tuple[int, list[int]]])

    def begin(self, continuation: Sequence[int]) -> int:
        """The position that predicts the first token of `continuation`."""
        return len(self.ids) - len(continuation)

    def first(self) -> int:
        """The first position that any request needs."""
        return min(self.begin(continuation) for _, continuation in self.requests)


class PackLM(TemplateLM):
    """The model interface that the harness calls.

    Attributes:
        preset: its name, for progress. cut: how many requests were longer than the window and lost their beginning.
        loaded: the model. kv_bits: of stored keys and values that likelihoods read too, one text at a time; None: they
            are not stored.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Any,
        stop_ids: Sequence[int],
        told: Told,
        kv_bits: int | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.preset, self.cut = "", 0
        self.loaded, self._stop_ids, self._told, self.kv_bits = loaded, tuple(stop_ids), told, kv_bits

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text that has nothing else before it."""
        start: int | None = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if start is None else start

    @property
    def max_length(self) -> int:
        """The model's window."""
        return self.loaded.window

    @property
    def tokenizer_name(self) -> str:
        """Names the chat template in the harness's records."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the prompt for the next answer, or, without generation prompt, as a text to continue.

        Raises:
            UsageError: a base model, which has no template, or one that does not take these roles in this order.
        """
        if not self.tokenizer.chat_template:
            raise UsageError("This model has no chat template", "It is a base model.", "Leave out --chat.")
        try:
            return self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        # A template is a program: besides its own errors it can divide by zero or add a number to a list.
        except Exception as error:
            raise UsageError("The model's chat template refuses a task", str(error), "Leave out --chat.") from error

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text. By default with the tokenizer's special tokens, but without a second start token."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """For each (context, continuation): the continuation's log-likelihood, and whether greedy decoding finds it."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """For each text: its log-likelihood, in windows as long as the model's, every token predicted once."""
        windows: list[tuple[tuple[str, str], list[int], list[int]]] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            (text,) = request.args
            for pair in get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1):
                context, continuation = make_disjoint_window(pair)
                windows.append((("", ""), context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        self.loaded.control.counting = False
        rows: dict[tuple[int, ...], _Row] = {}
        for index, (_, context, continuation) in enumerate(requests):
            ids = self._fit(context or [self.prefix_token_id], continuation)
            # Requests that read the same are computed once: the choices A, B, C and D of one question are such.
            rows.setdefault(ids, _Row(ids)).requests.append((index, continuation))
        values, greedy, done = [0.0] * len(requests), [True] * len(requests), 0
        for batch in _batches(rows.values()) if self.kv_bits is None else ([row] for row in rows.values()):
            for request, value, same in self._score(batch):
                values[request] += value
                greedy[request] = greedy[request] and same
            done += sum(len(row.requests) for row in batch)
            self._told(f"{self.preset}: {done} of {len(requests)} likelihoods")
        return list(zip(values, greedy, strict=True))

    def _fit(self, context: list[int], continuation: list[int]) -> tuple[int, ...]:
        """The tokens to read to predict `continuation`; a context that is too long loses its beginning."""
        if not 0 < len(continuation) <= self.max_length:
            raise FloeError(
                f"A task asks for the likelihood of {len(continuation)} tokens",
                f"One to {self.max_length} tokens, the model's window, are possible.",
                "Choose another task.",
            )
        both = context + continuation
        self.cut += len(both) > self.max_length + 1
        return tuple(both[-(self.max_length + 1) : -1])

    def _score(self, batch: Sequence[_Row]) -> Iterator[tuple[int, float, bool]]:
        """Yield, piece by piece, (request, log-likelihood, whether all tokens of the piece are the likeliest)."""
        length = len(batch[0].ids)
        # Padding stands to the right, where nothing that is scored can see it.
        ids = torch.tensor([row.ids + (0,) * (length - len(row.ids)) for row in batch])
        chunk = CHUNK if self.kv_bits is None else length
        store = LibraryStore() if length > chunk else None
        first = min(row.first() for row in batch)
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            offset = min(max(first, start), end - 1)  # the first position whose logits are asked for
            logits = self._logits(ids[:, start:end], store, keep=end - offset)
            for row, mine in zip(batch, logits, strict=True):
                for request, continuation in row.requests:
                    begin = row.begin(continuation)
                    low, high = max(begin, start), min(len(row.ids), end)
                    if low < high:
                        scores = mine[low - offset : high - offset].log_softmax(-1)
                        tokens = torch.tensor(continuation[low - begin : high - begin], device=scores.device)
                        value = float(scores.gather(-1, tokens[:, None]).sum())
                        yield request, value, bool((scores.argmax(-1) == tokens).all())

    def _logits(self, ids: Tensor, store: LibraryStore | None, keep: int) -> Tensor:
        """ids (B, T) -> logits of the last `keep` positions, (B, keep, V) float32."""
        if self.kv_bits is not None:
            return pack_logits(self.loaded, self.loaded.control.preset, ids, keep, self.kv_bits)[None]
        known = None if store is None else store.cache

        def forward() -> Any:
            with torch.inference_mode():
                return self.loaded.model(
                    input_ids=ids.to(self.loaded.device),
                    logits_to_keep=keep,
                    past_key_values=known,
                    use_cache=store is not None,
                )

        found = forward()
        logits = found.logits.float()
        if store is not None:
            store.cache = found.past_key_values
        if not math.isfinite(float(logits.sum())) and not bool(torch.isfinite(logits).all()):
            raise PackError(
                f"The packed model at {self.loaded.packed.folder} computes values that are not finite",
                f"The first come from {first_nonfinite(self.loaded.model, forward)}.",
                "Pack the source checkpoint again, or restore a copy.",
            )
        return logits

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """For each (context, options): the answer, up to the first of the texts that end it."""
        answers: list[str] = []
        for index, request in enumerate(requests):
            arguments: tuple[Any, ...] = request.args
            context, options = arguments
            answers.append(self._answer(context, options, seed=index))
            self._told(f"{self.preset}: {index + 1} of {len(requests)} answers")
        return answers

    def _answer(self, context: str, given: Mapping[str, Any], seed: int) -> str:
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), ANSWER_TOKENS))
        limit: int = options.pop("max_gen_toks")
        until = handle_stop_sequences(options.pop("until"), self.tokenizer.eos_token)
        room = self.max_length - limit
        if room < 1:
            raise FloeError(
                f"A task asks for answers of {limit} tokens",
                f"The model's window, for question and answer, is {self.max_length}.",
                "Choose another task.",
            )
        prompt = self.tok_encode(context)
        self.cut += len(prompt) > room
        steps = generate(
            self.loaded.decoder,
            KVCache(),
            prompt[-room:] or [self.prefix_token_id],
            _sampling(options, seed),
            max_new_tokens=limit,
            stop_ids=self._stop_ids,
            window=self.max_length,
            control=self.loaded.control,
            telemetry=self.loaded.telemetry,
        )
        tokens: list[int] = []
        for step in steps:
            if step.token is not None:
                tokens.append(step.token)
                text = self.tokenizer.decode(tokens)  # special tokens too, since they may end an answer
                if any(stop in text for stop in until if stop):
                    break
        return postprocess_generated_text(self.tokenizer.decode(tokens, skip_special_tokens=True), until, None)


def read_tokenizer(folder: Path) -> tuple[Any, tuple[int, ...]]:
    """A pack's tokenizer, which may be that of a base model, and the tokens that end an answer.

    Raises:
        PackError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer, GenerationConfig

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    # tokenizers reports a damaged file as a bare Exception, so nothing narrower can be caught here.
    except Exception as error:
        raise PackError(
            f"The tokenizer at {folder} cannot be read",
            str(error).splitlines()[0] if str(error) else type(error).__name__,
            "Restore tokenizer.json and tokenizer_config.json from the source checkpoint.",
        ) from error
    try:
        ends: Any = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:
        ends = None  # not every model publishes one
    ends = [tokenizer.eos_token_id] if ends is None else ends if isinstance(ends, list) else [ends]
    return tokenizer, tuple(end for end in ends if type(end) is int)


def _batches(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """Rows of similar length, longest first, so many at once that with padding they are CHUNK tokens, or one row."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: len(row.ids), reverse=True):
        if batch and (len(batch) + 1) * len(batch[0].ids) > CHUNK:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _sampling(options: dict[str, Any], seed: int) -> Sampling:
    """A task's options for drawing tokens. `seed` is the request's number: repeated runs draw the same, repeats not."""
    drawn = bool(options.pop("do_sample"))
    names = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    if unknown := sorted(options.keys() - names):
        raise FloeError(
            f"A task sets {', '.join(unknown)} for its answers",
            f"floe-chat knows {', '.join(sorted(names))}.",
            "Choose another task.",
        )
    return Sampling(
        temperature=float(options.get("temperature", 1.0)) if drawn else 0.0,
        top_k=int(options.get("top_k", 0)),
        top_p=float(options.get("top_p", 1.0)),
        min_p=float(options.get("min_p", 0.0)),
        repetition_penalty=float(options.get("repetition_penalty", 1.0)),
        seed=seed,
    )
