"""Options that several commands have: which model answers, and how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ...engine.quality_presets import PUBLISHED
from ...engine.ranges import MAX_TOKENS, PREDICTORS

Command = Callable[..., Any]
PUBLISHED_NAMES = ", ".join(rule.name for rule in PUBLISHED)

VRAM = click.option(
    "--vram",
    metavar="SIZE",
    help="Use at most this much GPU memory, of each card, such as 10gb.  [default: what is free]",
)
MIX = click.option(
    "--mix",
    "placement",
    metavar="KIND",
    help="Where experts are if they do not all fit GPU memory: pool or pool:SIZE (the rows used most), static "
    "(whole layers), cpu, or auto, the fastest by estimate.  [default: auto]",
)
MODEL = (
    click.option(
        "--model",
        "-m",
        default="demo",
        metavar="NAME|FOLDER",
        help="A packed model for this run: its name, or its folder.  [default: the model chosen last]",
    ),
    click.option(
        "--preset",
        "-p",
        metavar="NAME",
        help=f"Exact, High, Balanced or Fast, or a published rule: {PUBLISHED_NAMES}.  [default: Balanced]",
    ),
    click.option(
        "--device",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="auto, cpu, cuda or cuda:N; sim:NAME simulates a card in virtual time.",
    ),
    click.option(
        "--devices",
        metavar="NAME,NAME",
        help="Cards that share the model's layers, such as cuda:0,cuda:1, or sim:3090,sim:3060 in virtual time.",
    ),
    VRAM,
    MIX,
    click.option(
        "--predictor",
        type=click.Choice(PREDICTORS),
        help="What names the rows of a pool to fetch ahead.  [default: auto]",
    ),
    click.option(
        "--draft",
        "drafter",
        metavar="NAME|FOLDER",
        help="A smaller packed model of the same tokenizer that guesses further tokens. Answers stay the same.",
    ),
    click.option(
        "--no-draft",
        "draft",
        is_flag=True,
        flag_value=False,
        default=True,
        help="Compute token by token, without guessing further ones.",
    ),
    click.option(
        "--parallel",
        default="",
        metavar="PATTERN",
        help="How several processes (torchrun) divide the experts: tp, ep, etp or s-etp.  [default: what suits them]",
    ),
    click.option(
        "--balance", is_flag=True, help="Of several processes, let those with less to do leave out less of the experts."
    ),
)
SERVER = (
    click.option(
        "--connect",
        metavar="URL|NAME",
        help="Let an OpenAI-compatible server answer, such as http://127.0.0.1:8000, or one saved by `models "
        "add-server`. Questions go to that host.",
    ),
    click.option(
        "--key-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The server's key, in a file that only you can read.  [default: the variable FLOE_CHAT_KEY]",
    ),
)
DRAWING = (
    click.option(
        "--temperature", type=float, help="0 always picks the likeliest token.  [default: the model's, or 0.7]"
    ),
    click.option("--top-k", type=int, help="Sample from the K likeliest tokens; 0 is off.  [default: 0]"),
    click.option(
        "--top-p",
        type=float,
        help="Sample from the likeliest tokens up to this total probability; 1 is off.  [default: 1]",
    ),
    click.option(
        "--min-p",
        type=float,
        help="Drop tokens below this share of the likeliest token's probability.  [default: 0.05]",
    ),
    click.option("--repetition-penalty", type=float, help="Above 1, repetition is less likely.  [default: 1]"),
    click.option("--seed", type=int, help="The same seed gives the same answer.  [default: random]"),
)
SAMPLING = (
    *DRAWING,
    click.option(
        "--max-tokens",
        type=click.IntRange(int(MAX_TOKENS.low), int(MAX_TOKENS.high)),
        default=512,
        show_default=True,
        help="Maximum length of an answer, in tokens.",
    ),
    click.option("--system", metavar="TEXT", help="The system prompt of new chats."),
)


def given_by(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """A decorator: the command has these options, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
