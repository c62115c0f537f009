"""`floe-chat ask`: one question in, one answer out, for pipes and scripts."""

from __future__ import annotations

import dataclasses
import json
import secrets
import sys
from dataclasses import replace

from ..engine.events import Failed, Finished, Loaded, Loading, Notice, Sampling
from ..models.errors import FloeError
from .chat_client import ChatClient, Message, TextDelta


def answer(
    client: ChatClient, text: str, sampling: Sampling, max_tokens: int, system: str | None, *, as_json: bool
) -> int:
    """Ask, print the answer as it comes (or one JSON object at the end), and return the exit code.

    Raises:
        FloeError: the model cannot be loaded, or the question does not fit.
    """
    if sampling.seed is None:
        # Drawn here, so that --json can tell which seed gives this answer again.
        sampling = replace(sampling, seed=secrets.randbelow(1 << 32))
    client.start()
    try:
        loaded = _load(client)
        messages = [Message("system", system)] if system else []
        request = client.submit([*messages, Message("user", text)], sampling, max_tokens).request
        pieces: list[str] = []
        while True:
            for update in client.poll(timeout=0.1):
                match update:
                    case TextDelta():
                        pieces.append(update.text)
                        if not as_json:
                            sys.stdout.write(update.text)
                            sys.stdout.flush()
                    case Finished(request=done) if done == request:
                        _close(update, loaded, sampling, "".join(pieces), as_json=as_json)
                        return 0
                    case Notice(title, cause):
                        sys.stderr.write(f"floe-chat: {title}. {cause}\n")
                    case Failed():
                        raise _error(update)
                    case _:
                        pass
    except KeyboardInterrupt:
        client.cancel()
        raise
    finally:
        client.close()


def _load(client: ChatClient) -> Loaded:
    talk = sys.stderr.isatty()
    while True:
        for update in client.poll(timeout=0.1):
            match update:
                case Loading() if talk:
                    sys.stderr.write(f"\r\033[K{update.step} ...")
                    sys.stderr.flush()
                case Loaded():
                    if talk:
                        sys.stderr.write("\r\033[K")
                        sys.stderr.flush()
                    return update
                case Failed():
                    raise _error(update)
                case _:
                    pass


def _close(finished: Finished, loaded: Loaded, sampling: Sampling, text: str, *, as_json: bool) -> None:
    if not as_json:
        sys.stdout.write("\n")
        return
    stats = finished.stats
    fields = {
        "answer": text,
        "stop_reason": finished.reason,
        "model": loaded.model,
        "preset": loaded.preset,
        "backend": loaded.backend,
        "seed": sampling.seed,
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "first_token_s": stats.first_token_s,
        "decode_tokens_per_s": stats.decode_tps_mean,
        "active_neurons": stats.active_neurons,
        "bytes_per_token": stats.bytes_per_token,
        "rows": None if stats.rows is None else dataclasses.asdict(stats.rows),
    }
    sys.stdout.write(json.dumps(fields, ensure_ascii=False) + "\n")


def _error(failed: Failed) -> FloeError:
    error = FloeError(failed.title, failed.cause, failed.hint)
    error.exit_code = failed.exit_code
    return error
