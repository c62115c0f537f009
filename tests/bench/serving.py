"""The server with many clients at once, and conversations that take turns.

    python tests/bench/serving.py [--clients 50] [--seconds 120] [--model NAME|FOLDER]

Clients ask in turn, streamed and whole, greedily; each answer is compared with that of a client that is alone. The
server's memory is noted. Then four conversations take turns, with and without room for their keys and values.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil
from openai import AsyncOpenAI, OpenAI

sys.path.insert(0, str(Path(__file__).parents[2]))
from floe_chat.models.catalog import asset

WHAT = ("an expert", "a neuron", "a token", "a router", "a layer", "attention", "quantization", "a cache", "a row")
QUESTIONS = [f"What is {what}?" for what in WHAT]


@contextmanager
def served(*options: str) -> Generator[tuple[str, psutil.Process]]:
    """A server's address and its process."""
    command = [
        sys.executable,
        "-c",
        "from floe_chat.app.start import command; command()",
        "serve",
        "--port",
        "0",
        *options,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://\S+/v1", line)
            if found is None:
                raise SystemExit(line + process.stderr.read())
            yield found[0], psutil.Process(process.pid)
        finally:
            process.terminate()


async def crowd(url: str, process: psutil.Process, clients: int, seconds: float) -> None:
    """Let many ask at once."""
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)
    model = (await client.models.list()).data[0].id

    async def ask(question: str, who: int, *, stream: bool) -> str:
        given = {"model": model, "temperature": 0, "user": str(who), "max_tokens": 60}
        talk = [{"role": "user", "content": question}]
        if not stream:
            reply = await client.chat.completions.create(messages=talk, **given)  # pyright: ignore
            return reply.choices[0].message.content or ""
        pieces = await client.chat.completions.create(messages=talk, stream=True, **given)  # pyright: ignore
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

    alone = {question: await ask(question, 0, stream=False) for question in QUESTIONS}
    before, end = process.memory_info().rss, time.monotonic() + seconds
    took, other, failed = list[float](), 0, 0

    async def one(who: int) -> None:
        nonlocal other, failed
        number = who
        while time.monotonic() < end:
            question, began = QUESTIONS[number % len(QUESTIONS)], time.monotonic()
            number += 7
            try:
                other += await ask(question, who, stream=bool(number % 2)) != alone[question]
                took.append(time.monotonic() - began)
            except Exception as error:  # noqa: BLE001
                failed += 1
                print(type(error).__name__, str(error)[:200])

    await asyncio.gather(*map(one, range(clients)))
    grown = (process.memory_info().rss - before) / 1e6
    print(f"{clients} clients, {seconds:.0f} s: {len(took)} answers, {other} unlike the lone one, {failed} failed;")
    print(f"median {median(took):.2f} s, longest {max(took):.2f} s; memory {before / 1e6:.0f} MB and {grown:.1f} more")


def in_turn(url: str) -> None:
    """Four conversations of a few turns, each about a page."""
    client, text = OpenAI(base_url=url, api_key="none", max_retries=0), asset("demo", "manual.md").read_text("utf-8")
    model = client.models.list().data[0].id
    talks = [[{"role": "user", "content": text[start : start + 1800]}] for start in range(0, 6000, 1500)]
    waits, shares = list[float](), list[float]()
    for turn in range(4):
        for talk in talks:
            given = {"model": model, "messages": talk, "max_tokens": 30, "temperature": 0}
            reply = client.chat.completions.create(**given, extra_body={"floe": {"figures": True}})  # pyright: ignore
            choice, used = reply.choices[0], reply.usage
            assert used is not None and used.prompt_tokens_details is not None
            if turn:
                waits.append(choice.floe["first_token_s"])  # pyright: ignore
                shares.append((used.prompt_tokens_details.cached_tokens or 0) / used.prompt_tokens)
            talk += [
                {"role": "assistant", "content": choice.message.content or ""},
                {"role": "user", "content": "And?"},
            ]
    print(f"first token after {1e3 * median(waits):.1f} ms (median), {100 * median(shares):.0f} % of a prompt kept")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--model", default="demo")
    asked = parser.parse_args()
    with served("--model", asked.model) as (url, process):
        asyncio.run(crowd(url, process, asked.clients, asked.seconds))
    for memory in ("0", "1gb"):
        with served("--model", asked.model, "--kv-memory", memory) as (url, _):
            print(f"four conversations in turn, --kv-memory {memory}:", end=" ", flush=True)
            in_turn(url)


if __name__ == "__main__":
    main()
