"""A small server on this machine that plays recorded exchanges of OpenAI-compatible servers, and every kind of failure.

The recordings in `remote/` are written after the formats that the servers document: vLLM, SGLang, llama-server, Ollama.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "remote"
STREAM = "text/event-stream"
ANSWER = "An expert is a small network."


@dataclass
class Reply:
    """What a request gets: a status, a body in parts, and how it ends.

    `end`: "close", "die" (in the middle of a chunk), or "hang" (until the client goes or the test ends).
    """

    status: int = 200
    parts: tuple[bytes, ...] = ()
    kind: str = STREAM
    headers: dict[str, str] = field(default_factory=dict[str, str])
    end: str = "close"


@dataclass
class Asked:
    """A request that came."""

    path: str
    headers: Message
    body: Any


class ModelServer:
    """Answers GET with `models` and each POST with the next of `answers`, the last one again and again.

    Attributes:
        asked: the requests. left: set when a client closed its connection in a hanging answer.
    """

    def __init__(self, models: Reply, *answers: Reply, tls: ssl.SSLContext | None = None) -> None:
        self.models, self.answers = models, list(answers)
        self.asked: list[Asked] = []
        self.left, self.ended = threading.Event(), threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Stop serving; nothing listens there any more."""
        self.ended.set()
        self._http.shutdown()
        self._http.server_close()

    @property
    def questions(self) -> list[Asked]:
        """The requests for answers."""
        return [one for one in self.asked if one.body is not None]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.asked.append(Asked(self.path, self.headers, None))
                self._reply(server.models)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.asked.append(Asked(self.path, self.headers, body))
                self._reply(server.answers.pop(0) if len(server.answers) > 1 else server.answers[0])

            def _reply(self, reply: Reply) -> None:
                self.send_response(reply.status)
                given = {"content-type": reply.kind, "transfer-encoding": "chunked", "connection": "close"}
                for name, value in (given | reply.headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.close_connection = True
                try:
                    for part in reply.parts:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                    if reply.end == "hang":
                        self._wait_for_leaving()
                    elif reply.end == "die":
                        self.wfile.write(b"ff\r\n")
                    else:
                        self.wfile.write(b"0\r\n\r\n")
                except ConnectionError:
                    server.left.set()

            def _wait_for_leaving(self) -> None:
                self.connection.settimeout(0.02)
                while not server.ended.is_set():
                    try:
                        if self.connection.recv(1) == b"":
                            server.left.set()
                            return
                    except TimeoutError:
                        pass

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        return Handler


def models(*names: str, **fields: Any) -> Reply:
    """A list of models."""
    listed = [{"id": name, "object": "model", "owned_by": "test", **fields} for name in names]
    return Reply(parts=(json.dumps({"object": "list", "data": listed}).encode(),), kind="application/json")


def said(
    *deltas: dict[str, Any], reason: str | None = "stop", usage: dict[str, Any] | None = None
) -> tuple[bytes, ...]:
    """A stream of these deltas."""
    chunks: list[dict[str, Any]] = [{"id": "1", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if reason is not None:
        chunks.append({"id": "1", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    if usage is not None:
        chunks.append({"id": "1", "choices": [], "usage": usage})
    events = [b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks]
    return (*events, b"data: [DONE]\n\n") if reason is not None else tuple(events)


def refusing(status: int, message: str = "", **headers: str) -> Reply:
    """A refusal as OpenAI's servers word it."""
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": status}}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, (body,), "application/json", named)


def recorded(kind: str) -> ModelServer:
    """A server that plays the recording of this kind."""
    listed = (RECORDED / f"{kind}-models.json").read_bytes()
    stream = (RECORDED / f"{kind}-answer.sse").read_bytes()
    # In parts that begin and end within a line, as networks deliver them.
    parts = tuple(stream[at : at + 97] for at in range(0, len(stream), 97))
    return ModelServer(Reply(parts=(listed,), kind="application/json"), Reply(parts=parts))


@contextmanager
def serving(server: ModelServer) -> Generator[ModelServer]:
    """Closes the server at the end."""
    try:
        yield server
    finally:
        server.close()


def unused_port() -> int:
    """A port at which nothing listens."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]
