"""Trains the demo model on the CPU, repeatably: the schedule counts steps, never seconds."""

import ctypes
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from pathlib import Path

import torch
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.modeling_utils import PreTrainedModel

from .batches import TOKENS_PER_BATCH, batches
from .own_texts import OwnTexts
from .progress import TrainingProgress
from .shapes import BALANCE_WEIGHT, trained, untrained
from .vocabulary import BOS, EOS, build_tokenizer, mark_id

log = logging.getLogger(__name__)

# Two processes of one thread each beat one process of two: they meet once a step instead of once an operation.
WORKERS = 2
PEAK_RATE = 2e-3
CONTINUED_RATE = 1e-3  # likewise, of weights that know most of the texts already
WARMUP_STEPS = 100
BIAS_RATE = 1e-3  # of a router's correction bias, a step (DeepSeek-V3, 2.1.2)
GRADIENT_NORM = 1.0
SHARD_SIZE = "8MB"
LOG_EVERY = 25
KEEP_EVERY = 100  # steps: two minutes or so


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained: a model of that shape from random weights, or on from a checkpoint.

    Attributes:
        origin: the checkpoint whose weights and vocabulary it goes on from, where texts have changed a little.
        texts: to train on instead of the demo's dialogues.
    """

    shape: str
    steps: int
    seed: int
    origin: Path | None = None
    texts: OwnTexts | None = None

    def begun(self) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
        """The model before its first step, and its tokenizer."""
        if self.origin is not None:
            return trained(self.origin)
        tokenizer = build_tokenizer(self.texts.read(held_out=False) if self.texts else None)
        return untrained(self.shape, tokenizer), tokenizer

    def batches(self, tokenizer: PreTrainedTokenizerFast, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One worker's own, endless."""
        seed = self.seed * WORKERS + rank
        return self.texts.batches(tokenizer, seed) if self.texts else batches(tokenizer, seed)

    def rate(self, step: int) -> float:
        """The optimizer's, of one step."""
        return (CONTINUED_RATE if self.origin else PEAK_RATE) * rate_factor(step, self.steps)


def train(out: Path, training: Training) -> None:
    """Trains a model and writes the checkpoint into the folder `out`.

    The same training, Python and torch give the same weights on the same kind of CPU. After an interruption it
    continues from its last saved state (progress.py), with the same result.
    """
    context: SpawnContext = torch.multiprocessing.get_context("spawn")
    model, _ = training.begun()
    values = sum(tensor.numel() for tensor in (*model.parameters(), *correction_biases(model)))
    exchange = torch.zeros(2, WORKERS, values).share_memory_()
    meeting = context.Barrier(WORKERS)
    workers = [
        context.Process(target=_work, args=(rank, exchange, meeting, out, training), daemon=True)
        for rank in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError("a training process failed; its own message is above")


def _work(rank: int, exchange: torch.Tensor, meeting: threading.Barrier, out: Path, training: Training) -> None:
    """One of the processes: its own batches, the same weights as the others; the first one logs and saves.

    exchange (2, workers, values) f32 holds everybody's gradients, and the loads of experts behind them. Even and odd
    steps use different halves, so one meeting per step is enough: nobody writes into the half that another still reads.
    """
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    keep_freed_memory()
    steps = training.steps
    torch.manual_seed(training.seed)
    model, tokenizer = training.begun()
    # The library's fastest expert loop here in float32; bfloat16 is slower on CPUs without its instructions.
    model.set_experts_implementation("grouped_mm")
    model.train()
    whole, gradients, loads = _travelling(model)
    biases = correction_biases(model)
    optimizer = torch.optim.AdamW(_parameter_groups(model), lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    log.info("%.2f M parameters, %d steps", gradients.numel() / 1e6, steps)
    kept = TrainingProgress(
        out.with_name(f"{out.name}.training.safetensors"),
        model,
        optimizer,
        str(training),
    )
    first = kept.restore()
    if first:
        log.info("continuing after step %d", first)
    meeting.wait()  # both have read it before one overwrites it
    started, totals = time.monotonic(), torch.zeros(2)
    for step, (ids, wanted) in zip(range(steps), training.batches(tokenizer, rank), strict=False):
        if step < first:
            continue
        whole.zero_()
        text_loss, balance, load = losses(model, ids, wanted)
        (text_loss + BALANCE_WEIGHT * balance).backward()
        for layer, found in zip(loads, load, strict=False):
            layer.copy_(found)
        half = exchange[step % 2]
        half[rank].copy_(whole)
        meeting.wait()
        torch.mean(half, dim=0, out=whole)
        correct(biases, loads)
        gradients.mul_((GRADIENT_NORM / gradients.norm()).clamp(max=1.0))
        for group in optimizer.param_groups:
            group["lr"] = training.rate(step)
        optimizer.step()
        totals += torch.stack([text_loss.detach(), balance.detach()])
        if (step + 1) % LOG_EVERY == 0:
            loss, spread = (totals / LOG_EVERY).tolist()
            seconds = time.monotonic() - started
            speed = (step + 1 - first) * TOKENS_PER_BATCH * WORKERS / seconds
            log.info("step %d  loss %.3f  balance %.3f  %.0f tokens/s  %.0f s", step + 1, loss, spread, speed, seconds)
            totals.zero_()
        if rank == 0 and (step + 1) % KEEP_EVERY == 0:
            kept.keep(step + 1)
    if rank == 0:
        save(model, tokenizer, out)
        kept.remove()


def losses(
    model: PreTrainedModel, ids: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The mean cross entropy (nats) of the wanted tokens, the balance loss (1 when balanced) over layers, and the share
    of tokens (E,) that chose each expert of each layer.

    ids, wanted (B, T + 1). Transformers' own auxiliary loss pools all layers, so that one layer's dead expert
    can hide behind another layer's busy one. Here each layer is balanced by itself (Switch Transformer, eq. 4),
    and in each row, so that no kind of text depends on a single expert.
    """
    out = model.model(input_ids=ids[:, :-1], output_router_logits=True, use_cache=False)
    chosen = wanted[:, 1:]
    logits = model.lm_head(out.last_hidden_state[chosen])  # (wanted tokens, vocabulary)
    text_loss = F.cross_entropy(logits, ids[:, 1:][chosen])
    rows, used_at_once, biases = len(ids), model.config.num_experts_per_tok, correction_biases(model)
    per_layer: list[torch.Tensor] = []
    loads: list[torch.Tensor] = []
    for place, scores in enumerate(out.router_logits):  # (B * T, E)
        shares = scores.sigmoid() if biases else scores.softmax(-1)
        ranked = (shares + biases[place] if biases else shares).topk(used_at_once, dim=-1).indices
        if biases:
            shares = shares / shares.sum(-1, keepdim=True)
        used = torch.zeros_like(shares).scatter_(1, ranked, 1.0)
        load = used.view(rows, -1, used.shape[-1]).mean(1) / used_at_once  # (B, E)
        mean = shares.view(rows, -1, used.shape[-1]).mean(1)
        per_layer.append(used.shape[-1] * (load * mean).sum(-1).mean())
        loads.append(load.mean(0))
    return text_loss, torch.stack(per_layer).mean(), loads


def rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes bfloat16 shards under the published tensor names, the configs and the tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    start, end = mark_id(tokenizer, BOS), mark_id(tokenizer, EOS)
    # A small model wanders at higher temperatures.
    model.generation_config = GenerationConfig(
        bos_token_id=start, eos_token_id=end, pad_token_id=end, do_sample=True, temperature=0.3
    )
    model.save_pretrained(out, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(out)
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"), pretty=False)  # else half of it is indentation
    for file in out.iterdir():
        file.chmod(0o644)  # the library writes shards for their owner only


def keep_freed_memory() -> None:
    """Tells glibc to reuse large blocks instead of returning them: fewer page faults, a third more speed."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of <malloc.h>
    if hasattr(libc, "mallopt"):
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_max, 0)


def correction_biases(model: nn.Module) -> list[torch.Tensor]:
    """Those of a model's routers, layer by layer; none where routers have none."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def correct(biases: list[torch.Tensor], loads: list[torch.Tensor]) -> None:
    """Make experts that were chosen less often than the mean likelier, and the others less likely."""
    for bias, load in zip(biases, loads, strict=True):
        bias.add_(BIAS_RATE * (load.mean() - load).sign())


def _travelling(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """One vector (values,) that travels between the workers, its part that all gradients are views of, so that they are
    clipped as one, and its parts for the loads of experts.
    """
    parameters, biases = list(model.parameters()), correction_biases(model)
    count = sum(p.numel() for p in parameters)
    whole = torch.zeros(count + sum(bias.numel() for bias in biases))
    start = 0
    for parameter in parameters:
        parameter.grad = whole[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return whole, whole[:count], list(whole[count:].split([bias.numel() for bias in biases]))


def _parameter_groups(model: PreTrainedModel) -> list[dict[str, object]]:
    """Weight decay for matrices only: norms are scales around one."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    scales = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": scales, "weight_decay": 0.0}]
