"""Asks a finished checkpoint the held-out questions and looks at how evenly its experts are used."""

import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast
from transformers.modeling_utils import PreTrainedModel

from .corpus import python_texts
from .facts import FactCheck, read_heldout
from .shapes import trained
from .train import correction_biases
from .vocabulary import EOS, mark_id

log = logging.getLogger(__name__)

ANSWER_TOKENS = 250
WINDOW = 512


def report(folder: Path) -> None:
    """Logs held-out accuracy with every miss, held-out loss (nats per token) and the load of the experts."""
    model, tokenizer = trained(folder)
    checks = read_heldout()
    right = 0
    for check in checks:
        reply = answers(model, tokenizer, [*check.get("history", []), check.get("question", "")])[-1]
        missing = missing_facts(check, reply)
        right += not missing
        if missing:
            log.info("missed %s in: %s\n%s\n", missing, check.get("question"), reply)
    log.info("held-out questions: %d of %d right (%.1f %%)", right, len(checks), 100 * right / len(checks))
    loss, loads = held_out_text(model, tokenizer)
    log.info("held-out Python documentation: %.3f nats per token", loss)
    for layer, shares in enumerate(loads):
        log.info("layer %d: expert load over the mean: %s", layer, " ".join(f"{x:.2f}" for x in shares))


def missing_facts(check: FactCheck, reply: str) -> list[str]:
    """The expected strings that `reply` lacks, ignoring case; each may name alternatives as `a|b`."""
    text = reply.lower()
    return [fact for fact in check.get("expect", []) if not any(part in text for part in fact.lower().split("|"))]


def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: list[str]) -> list[str]:
    """The greedy answers to the questions of one chat, each seeing the earlier ones."""
    messages: list[dict[str, str]] = []
    replies: list[str] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        # The template writes the start mark itself.
        ids = tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids
        made = greedy(model, ids, mark_id(tokenizer, EOS))
        replies.append(tokenizer.backend_tokenizer.decode(made))
        messages.append({"role": "assistant", "content": replies[-1]})
    return replies


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], end: int) -> list[int]:
    """The most likely continuation, up to ANSWER_TOKENS tokens and without the end mark."""
    made: list[int] = []
    cache = None
    step = torch.tensor([prompt])
    while len(made) < ANSWER_TOKENS:
        out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        token = int(out.logits[0, -1].argmax())
        if token == end:
            break
        made.append(token)
        step = torch.tensor([[token]])
    return made


@torch.inference_mode()
def held_out_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> tuple[float, list[list[float]]]:
    """The loss on documentation kept out of training, and per layer each expert's load over the mean load."""
    config = model.config
    experts, used_at_once = config.num_local_experts, config.num_experts_per_tok
    biases = correction_biases(model)
    counts = torch.zeros(len(biases) or config.num_hidden_layers, experts)
    total, tokens = 0.0, 0
    for text in python_texts(held_out=True):
        ids = torch.tensor([tokenizer.backend_tokenizer.encode(text).ids[:WINDOW]])
        out = model(ids, output_router_logits=True)
        total += float(F.cross_entropy(out.logits[0, :-1], ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
        for layer, scores in enumerate(out.router_logits):  # (T, E)
            ranked = scores.sigmoid() + biases[layer] if biases else scores
            chosen = ranked.topk(used_at_once, dim=-1).indices.flatten()
            counts[layer] += torch.bincount(chosen, minlength=experts)
    return total / tokens, (counts / counts.mean(1, keepdim=True)).tolist()
