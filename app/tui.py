"""The terminal application: themes, commands, and what lies over the chat."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import ClassVar

from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ..engine.events import Sampling
from .bridge import EngineBridge, EngineFailed, EngineNotice
from .chat_client import ChatClient
from .screens.chat import ChatScreen
from .screens.help import HelpScreen
from .screens.too_small import SMALLEST, TooSmallScreen
from .widgets.themes import FLOE, FLOE_LIGHT

# The engine's thread and the screen share the interpreter: with Python's default of 5 ms a short call of either
# would wait for a whole turn of the other.
_SWITCH_INTERVAL = 0.0005


class FloeChatApp(App[int]):
    """floe-chat's screen around one client. The app returns an exit code; who made the client closes it."""

    TITLE = "floe-chat"
    CSS_PATH = "floe.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True),
        Binding("f1", "help", "Help", show=False),
    ]

    def __init__(
        self,
        client: ChatClient,
        *,
        sampling: Sampling,
        max_new_tokens: int,
        system_prompt: str | None = None,
    ) -> None:
        super().__init__()
        self._bridge = EngineBridge(client)
        self._chat = ChatScreen(self._bridge, sampling, max_new_tokens, system_prompt)
        self._exit_code = 0

    def get_default_screen(self) -> Screen[None]:
        return self._chat

    def on_mount(self) -> None:
        self.register_theme(FLOE)
        self.register_theme(FLOE_LIGHT)
        self.theme = FLOE.name

    def on_ready(self) -> None:
        # The first frame is on the terminal: now the engine may import what takes seconds.
        self._bridge.start(self._chat)

    async def on_resize(self, event: events.Resize) -> None:
        too_small = event.size.width < SMALLEST.width or event.size.height < SMALLEST.height
        notice = self.screen if isinstance(self.screen, TooSmallScreen) else None
        if too_small and notice is None:
            await self.push_screen(TooSmallScreen(event.size))
        elif too_small and notice is not None:
            notice.show_size(event.size)
        elif notice is not None:
            await self.pop_screen()

    def on_engine_notice(self, event: EngineNotice) -> None:
        """Say it without standing in the way."""
        self.notify(event.cause, title=event.title, severity="warning", timeout=12)

    def on_engine_failed(self, event: EngineFailed) -> None:
        if not self._chat.presets:
            self._exit_code = event.exit_code

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if isinstance(self.screen, TooSmallScreen):
            return action == "quit"
        return super().check_action(action, parameters)

    async def action_quit(self) -> None:
        self.exit(self._exit_code)

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        chat = self._chat
        yield SystemCommand("New chat", "Forget this chat and begin another (Ctrl+N)", chat.action_new_chat)
        yield SystemCommand("Stop", "Stop the running answer (Esc)", chat.action_stop)
        yield SystemCommand("Panel", "Show or hide the live panel (F2)", chat.action_toggle_panel)
        for preset in chat.presets:
            yield SystemCommand(
                f"Preset: {preset}", "Use this quality from the next token on (F3)", partial(chat.choose_preset, preset)
            )
        yield SystemCommand("Help", "Keys and the panel's words (F1)", self.action_help)
        yield SystemCommand("Theme", "Choose the colours", self.action_change_theme)
        yield SystemCommand("Quit", "Leave floe-chat (Ctrl+Q)", self.action_quit)


def run_app(client: ChatClient, sampling: Sampling, max_new_tokens: int, system_prompt: str | None) -> int:
    """Show the chat until the person quits; returns the exit code."""
    app = FloeChatApp(client, sampling=sampling, max_new_tokens=max_new_tokens, system_prompt=system_prompt)
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        code = app.run()
    finally:
        sys.setswitchinterval(before)
        client.close()
    return 1 if code is None else code
