"""`floe-chat serve`: the model for other programs, by OpenAI's protocol."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import click

from ...engine.events import MOST_TOGETHER
from ...models.errors import FloeError, UsageError
from ..client.remote.address import KEY_VARIABLE, read_key
from ..text.plain_text import printable
from .options import DRAWING, MODEL, given_by

# Of connections: silence until the client is asked whether it is there, how often, and how long it may not confirm what
# was sent (seconds, seconds, times, milliseconds); each where the system knows it.
_VANISHED = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 60_000))


@click.command(short_help="Answer other programs by OpenAI's protocol.")
@given_by(*MODEL)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at; others need a key.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option(
    "--key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Answer only who sends the key in FILE (or in the variable {KEY_VARIABLE}).",
)
@click.option("--queue", type=click.IntRange(1, 10_000), default=64, show_default=True, help="Answers that may wait.")
@click.option(
    "--together",
    type=click.IntRange(1, MOST_TOGETHER),
    default=MOST_TOGETHER,
    show_default=True,
    help="Answers computed at once, where that is faster.",
)
@click.option(
    "--kv-memory",
    metavar="SIZE",
    help="RAM for conversations that may go on, such as 2gb; 0 keeps none.  [default: 1/32 of what is free]",
)
@click.option("--allow-origin", "origins", multiple=True, metavar="URL", help="Let pages of URL ask; may be repeated.")
@given_by(*DRAWING)
@click.pass_context
def serve(
    ctx: click.Context,
    host: str,
    port: int,
    key_file: Path | None,
    queue: int,
    together: int,
    origins: tuple[str, ...],
    **options: Any,
) -> None:
    """Answer other programs (editors, scripts, other chats) by OpenAI's protocol, until Ctrl+C.

    Only programs on this machine reach it. Another --host, such as 0.0.0.0, lets other machines ask, with a key.
    Nothing is saved. Sampling options are for requests that do not say.

    \b
    floe-chat serve --model NAME
    curl http://127.0.0.1:8080/v1/models
    """
    from ..server.guard import LOOPBACK

    key = _key(key_file)
    if host not in LOOPBACK and key is None:
        raise UsageError(
            f"At {host} every machine of the network could ask",
            "The server listens at another address than this machine's own only with a key.",
            f"Put a long random word into a file and add --key-file FILE, or set {KEY_VARIABLE}.",
        )
    from ..chat.beginning import begin

    options |= {"max_tokens": 1, "system": None, "connect": None, "key_file": None}  # each request says its own
    ctx.exit(_serve(begin(ctx, options), listen_at(host, port), key, (queue, together), origins))


def _key(file: Path | None) -> str | None:
    """The key in a file, or in the environment; None if neither is given.

    Raises:
        UsageError: what is given is no key.
    """
    given = file is not None or KEY_VARIABLE in os.environ
    key = read_key(file).value
    if given and not key:
        hint = "Make one with: openssl rand -hex 32"
        raise UsageError(f"{file or KEY_VARIABLE} holds no key", "It is empty: anybody could ask.", hint)
    return key or None


def listen_at(host: str, port: int) -> socket.socket:
    """A socket whose connections end some time after their client has vanished without a word.

    Raises:
        FloeError: the address cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)  # asyncio sends at once only where the protocol is named
        if os.name == "posix":  # elsewhere it would let two servers share a port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _VANISHED:
            if (option := getattr(socket, name, None)) is not None:
                listening.setsockopt(socket.IPPROTO_TCP, option, value)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        cause = f"{error.strerror or error}."
        raise FloeError(f"No server can listen at {host}:{port}", cause, "Choose another --port or --host.") from error
    return listening


def _serve(
    beginning: Any, listening: socket.socket, key: str | None, line: tuple[int, int], origins: tuple[str, ...]
) -> int:
    from ..client.chat_client import ChatClient
    from ..client.loading import wait_until_loaded
    from ..server.application import application
    from ..server.connections import Server
    from ..server.guard import LOOPBACK, Guard
    from ..server.scheduler import Scheduler

    client = beginning.client
    assert isinstance(client, ChatClient)
    client.start()
    try:
        loaded = wait_until_loaded(client)
    except BaseException:
        client.close()
        raise
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    guard = Guard(key, LOOPBACK if key is None else None, origins)
    scheduler = Scheduler(client, loaded, *line)
    app = application(scheduler, beginning.sampling, guard, origins)
    sys.stderr.write(printable(f"floe-chat: {loaded.model} answers at http://{shown}:{port}/v1 until Ctrl+C.\n"))
    Server(app, scheduler).run(sockets=[listening])
    return 0
