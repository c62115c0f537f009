"""What a server is asked: the chat, how to draw, and which of that it may not understand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..interface import Question
from .models import Offered

_REFUSING = re.compile(
    "not (support|permitted|allowed)|unsupported|unrecogni[sz]ed|unknown|unexpected|extra|invalid", re.IGNORECASE
)
_CONTINUES = ("vLLM", "SGLang")


def body(model: Offered, question: Question, *, think: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that every server knows, and those that some refuse (see `refused`).

    Sampling values that are off are not sent. The question's `answer` is to be continued where it ends.
    """
    sampling, answer = question.sampling, question.answer
    turns = [{"role": turn.role, "content": turn.text} for turn in question.messages]
    if answer:
        turns.append({"role": "assistant", "content": answer})
    needed = {"model": model.id, "messages": turns, "stream": True, "temperature": sampling.temperature}
    options: dict[str, Any] = {"include_usage": True}
    others: dict[str, Any] = {"stream_options": options, "max_tokens": question.max_new_tokens}
    if model.maker in _CONTINUES:
        options["continuous_usage_stats"] = True
    elif model.maker == "llama-server":
        others["timings_per_token"] = True
    penalty = "repeat_penalty" if model.maker == "llama-server" else "repetition_penalty"
    chosen = (
        ("top_p", sampling.top_p, 1.0),
        ("top_k", sampling.top_k, 0),
        ("min_p", sampling.min_p, 0.0),
        (penalty, sampling.repetition_penalty, 1.0),
        ("seed", sampling.seed, None),
    )
    others |= {name: value for name, value, off in chosen if value != off}
    if answer and model.maker in _CONTINUES:
        others |= {"continue_final_message": True, "add_generation_prompt": False}
    if not think:
        others["chat_template_kwargs"] = {"enable_thinking": False}
    return needed, others


def refused(said: str, others: dict[str, Any]) -> list[str]:
    """Those of the `others` that a server's refusal names as not understood."""
    if not _REFUSING.search(said):
        return []
    return [name for name in others if re.search(rf"(?<![a-z_]){name}(?![a-z_])", said)]


def without(others: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The `others` without these names. The length of an answer gets its newer name instead."""
    kept = {name: value for name, value in others.items() if name not in names}
    if "max_tokens" in names and "max_tokens" in others:
        kept["max_completion_tokens"] = others["max_tokens"]
    return kept
