"""The pages above the chat: earlier chats, this chat's settings, quality, experts."""

from __future__ import annotations

from collections.abc import Mapping

from textual.screen import Screen
from textual.timer import Timer

from ....models.errors import FloeError
from ...chat.controller import Controller, Do
from ...client.bridge import EngineBridge
from ...history import ChatSetup, History
from ...widgets.panel.figures import PanelFigures
from ..experts import ExpertsScreen
from ..history import HistoryScreen, PickedChat
from ..quality import QualityScreen
from ..setup import SetupScreen

_LOOK_SECONDS = 0.2  # between two looks at the history while its page is open


class ChatPages:
    """Opens them over `screen`, and carries out what the user chose there."""

    def __init__(
        self,
        screen: Screen[None],
        bridge: EngineBridge,
        history: History,
        controller: Controller,
        figures: PanelFigures,
    ) -> None:
        self._screen = screen
        self._bridge = bridge
        self._history = history
        self._controller = controller
        self._figures = figures
        self._looking: Timer | None = None

    @property
    def does(self) -> Mapping[str, Do]:
        """The functions of the actions that open pages, by name."""
        return {
            "history": self._open_history,
            "setup": self._open_setup,
            "quality": self._open_quality,
            "experts": self._open_experts,
        }

    def history_changed(self) -> None:
        """This program or another one wrote to the history."""
        if isinstance(self._screen.app.screen, HistoryScreen):
            self._screen.app.screen.refresh_list()

    def _open_history(self, words: str = "") -> None:
        # Only polling sees what other programs write.
        self._looking = self._screen.set_interval(_LOOK_SECONDS, lambda: self._bridge.drain(self._screen))
        page = HistoryScreen(self._history, words, self._controller.dialogue.id)
        self._screen.app.push_screen(page, self._chosen)

    async def _chosen(self, choice: PickedChat | None) -> None:
        if self._looking is not None:
            self._looking.stop()
        try:
            if choice is None:
                return
            if choice.conversation is not None:
                await self._controller.chats.open(choice.conversation, choice.message)
            elif self._controller.dialogue.id in choice.deleted:
                await self._controller.chats.begin()
        except FloeError as error:
            await self._controller.view.messages.explain(error)

    def _open_setup(self) -> None:
        dialogue, model = self._controller.dialogue, self._controller.model
        personas = self._controller.setting.personas
        page = SetupScreen(dialogue.name, dialogue.setup, personas, model.known, model.wanted)
        self._screen.app.push_screen(page, self._set_up)

    def _set_up(self, chosen: tuple[str, ChatSetup] | None) -> None:
        if chosen is not None:
            self._controller.chats.set_up(*chosen)

    def _open_quality(self) -> None:
        model = self._controller.model
        if model.presets:
            self._screen.app.push_screen(QualityScreen(model, self._figures))
        else:
            self._controller.view.gauges.remark(model.no_presets)

    def _open_experts(self) -> None:
        if remote := self._controller.model.client.remote:
            self._controller.view.gauges.remark(f"{remote} does not say which experts it calls")
            return
        self._screen.app.push_screen(ExpertsScreen(self._figures))
