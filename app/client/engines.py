"""The engine that answers, and the next one: models of this machine and servers behind one `Client`.

The engine in use stays until the next one answers, so a server that cannot be reached costs nothing. While a server
answers, the local engine holds no model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...engine.events import Failed, Finished, Loaded, Rule, Stats
from ..settings.servers import SavedServer
from .chat_client import ChatClient
from .interface import Choice, Client, Costs, PromptTurn, Question, Submitted, Update


@dataclass(slots=True)
class _Engine:
    """`answer`: whether it is loaded, as it said itself; None while it loads. `stats`: its last figures."""

    client: Client
    answer: Loaded | Failed | None = None
    stats: Stats | None = None

    def poll(self, timeout: float) -> list[Update]:
        updates = self.client.poll(timeout)
        for update in updates:
            match update:
                case Loaded() | Failed(request=None):
                    self.answer = update
                case Stats():
                    self.stats = update
                case Finished():
                    self.stats = update.stats
                case _:
                    pass
        return updates

    @property
    def loaded(self) -> bool:
        return isinstance(self.answer, Loaded)

    @property
    def failed(self) -> bool:
        return isinstance(self.answer, Failed)

    @property
    def said(self) -> list[Update]:
        return [update for update in (self.answer, self.stats) if update is not None]


class Engines:
    """See `interface.Client`; everything but `open`, `poll` and `close` is done by the engine that was opened last."""

    def __init__(self, first: Client, local: Callable[[Path], ChatClient]) -> None:
        """`first`: the engine to begin with. `local`: makes one for models of this machine, once one is chosen."""
        self._now = _Engine(first)
        self._next: _Engine | None = None
        self._local, self._make = first if isinstance(first, ChatClient) else None, local
        self._again: list[Update] = []  # to be said once more
        self._heard: Callable[[], None] = lambda: None

    @property
    def _asked(self) -> Client:
        return (self._next or self._now).client

    def open(self, chosen: Choice, placement: str | None = None) -> None:
        """See `Client`. A running answer ends first.

        Raises:
            UsageError: that is no address of a server.
        """
        left = self._next
        same = chosen == self._now.client.chosen and placement in (None, self._now.client.placement)
        if same and not self._now.failed:
            self._next, self._again = None, self._now.said
        elif isinstance(chosen, SavedServer):
            self._next = self._start(self._remote(chosen))
        elif self._local is None:
            self._local = self._make(chosen)
            self._next = self._start(self._local)
        else:
            self._local.open(chosen, placement)
            engine = _Engine(self._local)
            if self._now.client is self._local:
                self._now, self._next = engine, None
            else:
                self._next = engine
        if left is not None and left.client is not self._asked:
            self._retire(left.client)
        self._heard()

    def _remote(self, chosen: SavedServer) -> Client:
        from .remote.address import Address, Key
        from .remote.client import Patience, RemoteClient

        # It is asked once: the engine in use goes on if it does not answer.
        patience = Patience(first=None)
        return RemoteClient(Address.parse(chosen.url), Key(chosen.key), chosen.model or None, patience=patience)

    def _start(self, client: Client) -> _Engine:
        client.think = self.think
        client.listen(self._heard)
        client.start()
        return _Engine(client)

    def _retire(self, client: Client) -> None:
        """Without waiting: of the local engine only the model is given back."""
        if isinstance(client, ChatClient):
            client.unload()
        else:
            threading.Thread(target=client.close, name="floe-retired", daemon=True).start()

    def start(self) -> None:
        """Begin with the first engine; returns at once."""
        self._now.client.start()

    def listen(self, heard: Callable[[], None]) -> None:
        """Have `heard` called, on some thread, whenever there is something to `poll`."""
        self._heard = heard
        self._now.client.listen(heard)

    def poll(self, timeout: float = 0.0) -> list[Update]:
        """What happened since the last call, in order; waits at most `timeout` seconds for the first.

        Of the engine in use nothing is reported while another one is opened.
        """
        again, self._again = self._again, []
        if self._local is not None and self._local not in (self._now.client, self._asked):
            self._local.poll()  # that it is unloaded
        if self._next is None:
            return again + self._now.poll(0.0 if again else timeout)
        unsaid, updates = self._now.poll(0.0), self._next.poll(timeout)
        if self._next.loaded:
            self._retire(self._now.client)
            self._now, self._next = self._next, None
        elif self._next.failed and any(isinstance(update, Loaded) for update in unsaid):  # it came after all
            self._retire(self._next.client)
            self._next, updates = None, updates + unsaid
        return again + updates

    def close(self) -> None:
        """End all of them; never hangs."""
        clients = [self._now.client, *([self._next.client] if self._next else [])]
        for client in [*clients, *([self._local] if self._local and self._local not in clients else [])]:
            client.close()

    # Of the engine that was opened last

    @property
    def think(self) -> bool:
        """See `Client`."""
        return self._asked.think

    @think.setter
    def think(self, wanted: bool) -> None:
        for engine in filter(None, (self._now, self._next)):
            engine.client.think = wanted

    @property
    def chosen(self) -> Choice:
        """See `Client`."""
        return self._asked.chosen

    @property
    def placement(self) -> str:
        """See `Client`."""
        return self._asked.placement

    @property
    def reference(self) -> str:
        """See `Client`."""
        return self._asked.reference

    @property
    def remote(self) -> str:
        """See `Client`."""
        return self._asked.remote

    @property
    def privacy(self) -> str:
        """See `Client`."""
        return self._asked.privacy

    @property
    def thinking(self) -> str:
        """See `Client`."""
        return self._asked.thinking

    def submit(self, question: Question) -> Submitted:
        """See `Client`."""
        return self._asked.submit(question)

    def prepare(self, question: Question, count: int = 1) -> list[int]:
        """See `Client`."""
        return self._asked.prepare(question, count)

    def begin(self) -> None:
        """See `Client`."""
        self._asked.begin()

    def most_new(self, max_new_tokens: int) -> int:
        """See `Client`."""
        return self._asked.most_new(max_new_tokens)

    def count(self, text: str) -> int | None:
        """See `Client`."""
        return self._asked.count(text)

    def context_of(self, messages: Sequence[PromptTurn], max_new_tokens: int) -> tuple[int, int] | None:
        """See `Client`."""
        return self._asked.context_of(messages, max_new_tokens)

    def costs(self) -> Costs:
        """See `Client`."""
        return self._asked.costs()

    def cancel(self, request: int | None = None) -> None:
        """See `Client`."""
        self._asked.cancel(request)

    def set_preset(self, preset: str) -> None:
        """See `Client`."""
        self._asked.set_preset(preset)

    def set_quality(self, rule: Rule) -> None:
        """See `Client`."""
        self._asked.set_quality(rule)
