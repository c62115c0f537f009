"""The terminal application: themes, keys, commands, and the pages over the chat."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.app import App, SystemCommand
from textual.binding import BindingType
from textual.filter import LineFilter, Monochrome, NoColor
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.theme import Theme
from textual.widgets import Input, TextArea

from ..engine.events import Failed, Loaded, Notice, Sampling
from ..models.catalog import find
from ..models.errors import FloeError
from .actions import COMMANDS, OWN, Scope
from .background import in_background, later
from .chat.beginning import Beginning, need_saving
from .chat.controller import ModelNotLoaded
from .client.bridge import Heard
from .client.engines import Engines
from .client.interface import Client
from .history import ChatSetup, History, history_file
from .screens.chat.chat import ChatScreen
from .screens.too_small import SMALLEST, TooSmallScreen
from .settings.file import SettingsRead, change_soon, read, settings_file, told, with_installed_model, with_known_theme
from .settings.servers import SavedServer
from .settings.settings import Settings
from .setup.setups import Setups, first_run
from .terminal.terminal import EXIT_SIGNAL, Terminal
from .text.emoji import PlainEmoji
from .widgets.common.keys import bindings, key_of
from .widgets.common.themes import THEMES

# The engine's thread and the screen share the interpreter: with Python's default of 5 ms a short call of either would
# wait a whole switch interval for the other.
_SWITCH_INTERVAL = 0.0005
_SETUP_PERIOD = 1.0  # seconds between two looks at a running setup
_TWICE_SECONDS = 2.0  # within which a second Ctrl+C quits
_PLAIN_EMOJI = PlainEmoji()


@dataclass(frozen=True, slots=True)
class Reopened:
    """The saved chat to begin with. own_model: its own model answers, not the requested one."""

    conversation: int
    own_model: bool = True


class FloeChatApp(App[int]):
    """floe-chat's screen around one client. Returns an exit code; the caller closes the client and the history."""

    TITLE = "floe-chat"
    CSS_PATH: ClassVar[list[str]] = ["floe.tcss", "pages.tcss"]  # pyright: ignore[reportIncompatibleVariableOverride]
    BINDINGS: ClassVar[list[BindingType]] = bindings(Scope.ANYWHERE)

    def __init__(
        self,
        client: Client,
        *,
        sampling: Sampling,
        max_new_tokens: int,
        system_prompt: str | None = None,
        history: History | None = None,
        settings: Path | None = None,
        terminal: Terminal | None = None,
        reopened: Reopened | None = None,
        named: bool = False,
    ) -> None:
        """`history`: where chats are saved, None: nowhere. `settings`: the file, None: the defaults. `terminal`: holds
        the terminal until the screen is there. `reopened`: the saved chat to begin with, None: a new one. `named`:
        whether the person named the model, who is asked for none then.
        """
        super().__init__()
        self.sub_title = f"remote {client.remote}" if client.remote else ""  # on pages that hide the chat
        self._named = named
        self._terminal, self._reopened = terminal, reopened
        self._file = settings
        self._settings = with_installed_model(read(settings), settings) if settings else SettingsRead(Settings())
        own = self._settings.settings
        setup = _setup_of_new(client, sampling, system_prompt or "", own)
        pages = {
            "models": self._open_models,
            "wizard": partial(self._show_wizard, self._switch),
            "settings": self._open_settings,
            "theme": self.action_change_theme,
            "thinking": self._choose_thinking,
            "help": self.action_help,
            "quit": self.action_quit,
        }
        self._chat = ChatScreen(client, history or History(None), setup, max_new_tokens, own.personas, pages)
        self._exit_code = 0
        self._events: asyncio.AbstractEventLoop | None = None  # that of the screen, once it runs
        self._early: list[events.Event] | None = []  # keys that were pressed before the screen was there
        self._next_look: asyncio.TimerHandle | None = None
        self._interrupted = -_TWICE_SECONDS  # when Ctrl+C was pressed last
        self._untried: tuple[Path, str] | None = None  # the pack chosen last, and the model the settings named before
        self.setups = Setups()

    def get_default_screen(self) -> Screen[None]:
        return self._chat

    @property
    def given_keys(self) -> Mapping[str, str]:
        """The key of every action, see `keys.Keyed`."""
        return self._settings.settings.keys

    def on_load(self) -> None:
        self._events = asyncio.get_running_loop()
        if self._terminal is not None:
            self._terminal.hand_over()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        if isinstance(event.widget, Input | TextArea):
            event.widget.cursor_blink = False  # painting each blink would take 1 % of a core in idle

    def on_mount(self) -> None:
        for theme in THEMES:
            self.register_theme(theme)
        self._apply(self._settings)
        self._chat.dashboard.show_panel(self._settings.settings.panel)
        self.theme_changed_signal.subscribe(self, self._keep_theme)

    def on_ready(self) -> None:
        # The first frame is on the terminal: now the engine may start its slow imports.
        self._chat.start()
        in_background(self, _import_later, lambda _none: None)
        early, self._early = self._early or [], None
        for key in early:
            self.post_message(key)
        if self._reopened is not None:
            reopen = self._chat.controller.chats.reopen
            self._chat.call_later(reopen, self._reopened.conversation, own_model=self._reopened.own_model)
        if self._file is not None and not self._named and first_run(self._file):
            self._show_wizard(self._welcomed)
        if problems := self._settings.problems:  # in one toast: several would cover the text field
            title, said = told(self._file, problems)
            self.notify(said, title=title, severity="warning", timeout=15, markup=False)

    def get_line_filters(self) -> Sequence[LineFilter]:
        # With NO_COLOR Textual would still send greys and faint text.
        usual = [NoColor() if isinstance(one, Monochrome) else one for one in super().get_line_filters()]
        return [*usual, _PLAIN_EMOJI]

    async def on_event(self, event: events.Event) -> None:
        if self._early is not None and isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            self._early.append(event)  # nothing has the focus yet
        else:
            await super().on_event(event)

    async def on_resize(self, event: events.Resize) -> None:
        too_small = event.size.width < SMALLEST.width or event.size.height < SMALLEST.height
        notice = self.screen if isinstance(self.screen, TooSmallScreen) else None
        if too_small and notice is None:
            await self.push_screen(TooSmallScreen(event.size))
        elif too_small and notice is not None:
            notice.show_size(event.size)
        elif notice is not None:
            await self.pop_screen()

    def on_heard(self, event: Heard) -> None:
        match event.news:
            case Notice(title, cause):
                self.notify(cause, title=title, severity="warning", timeout=12, markup=False)
            case Failed(request=None, exit_code=code) if not self._chat.controller.model.presets:
                self._exit_code = code
            case Loaded(folder=folder):  # a model answers now, even if one failed before
                self._exit_code = 0
                if self._untried is not None and self._untried[0] == Path(folder):
                    self._untried = None
            case _:
                pass

    def on_model_not_loaded(self, event: ModelNotLoaded) -> None:
        """A chosen model that cannot be loaded must not be the next start's model."""
        if self._untried is not None and self._untried[0] == event.chosen:
            self._start_with(self._untried[1])
            self._untried = None

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if isinstance(self.screen, TooSmallScreen):
            return action == "quit"
        return super().check_action(action, parameters)

    async def action_quit(self) -> None:
        self.leave(self._exit_code)

    def leave(self, code: int) -> None:
        """End with this exit code; signal handlers call it too, between any two steps of this thread."""
        if self._terminal is not None:
            if self._events is None:
                self._terminal.end_soon(code)
                return
            self._terminal.expect_end(code)
        assert self._events is not None, "only the terminal ends a screen that does not run yet"
        self._events.call_soon_threadsafe(self._leave, code)

    def _leave(self, code: int) -> None:
        self._chat.controller.close()
        self.exit(code)

    def action_help_quit(self) -> None:
        """Ctrl+C without selected text: the first stops the answer, the second quits."""
        now = time.monotonic()
        if now - self._interrupted < _TWICE_SECONDS:
            self.leave(EXIT_SIGNAL + signal.SIGINT)
            return
        self._interrupted = now
        stopped = self._chat.controller.model.answering
        if stopped:
            self._chat.controller.model.stop()
        again = f"Press Ctrl+C again within {_TWICE_SECONDS:.0f} seconds to quit floe-chat"
        self.notify(f"The answer is stopped. {again}" if stopped else again, timeout=_TWICE_SECONDS)

    def action_redraw(self) -> None:
        """Repaint everything, after another program wrote to the terminal."""
        self.screen.refresh()

    def action_help(self) -> None:
        from .screens.help import HelpScreen, help_of

        self.push_screen(HelpScreen(help_of(self.screen, self.given_keys)))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        return _palette(self._chat)

    def _tell(self, error: FloeError, severity: SeverityLevel = "warning") -> None:
        self.notify(f"{error.cause} {error.hint}", title=error.title, severity=severity, markup=False)

    def _apply(self, found: SettingsRead) -> None:
        """Apply the settings of the screen at once."""
        if self._file is not None:
            found = with_known_theme(found, self._file, self.available_themes)
        self._settings = found
        settings = found.settings
        # Only what differs: each press of a key applies the whole map to every node above it.
        self.set_keymap({name: key for name, key in settings.keys.items() if key != OWN[name].keys})
        self._chat.take_keys(settings.keys)
        self._chat.controller.thinking.take(settings.thinking)
        self.theme = settings.theme

    def _save(self, values: Mapping[str, object]) -> None:
        """Change the settings file, if there is one."""
        if self._file is not None:
            try:
                change_soon(self._file, values, lambda error: self.call_later(self._saved, error))
                self._saved(None)
            except FloeError as error:
                self._saved(error)

    def _saved(self, error: FloeError | None) -> None:
        if error is not None:
            self._tell(error)
        if self._file is not None:
            self._settings = read(self._file)

    def _keep_theme(self, theme: Theme) -> None:
        """Save the chosen theme in the settings."""
        if theme.name != self._settings.settings.theme:
            self._save({"screen.theme": theme.name})

    def _choose_thinking(self, mode: str) -> None:
        """Fold, show or leave out what models think, now and at later starts."""
        if self._chat.controller.thinking.choose(mode):
            self._save({"chat.thinking": mode})

    def _open_settings(self) -> None:
        from .screens.settings import SettingsScreen

        self.push_screen(SettingsScreen(self._file, self._settings, self._apply, self._chat.dashboard.figures.stats))

    def _open_models(self) -> None:
        from .screens.models import ModelsScreen

        model = self._chat.controller.model
        chosen = model.client.chosen
        current = chosen if isinstance(chosen, SavedServer) else model.name
        self.push_screen(ModelsScreen(self.setups, current=current, settings=self._file), self._switch)

    def _show_wizard(self, then: Callable[[str | None], Awaitable[None]]) -> None:
        from .screens.wizard.wizard import WizardScreen

        self.push_screen(WizardScreen(self.setups, settings=self._file), then)

    async def _welcomed(self, name: str | None) -> None:
        """The first run's wizard was closed: later starts open the chat at once."""
        self._save({})
        await self._switch(name)

    def _watch_setup(self) -> None:
        """Show the setup's progress in the chat while it runs; only pages above the chat start and stop it."""
        if self._next_look is not None:
            self._next_look.cancel()
        said, setup = self.setups.words(), self.setups.setup
        if setup is not None and setup.progress().state == "done":
            said += f": {key_of(self._chat, 'models')} chats with it"
        self._chat.dashboard.say_beside(said)
        self._next_look = later(self, _SETUP_PERIOD, self._watch_setup) if self.setups.moving else None

    async def _switch(self, chosen: str | SavedServer | None) -> None:
        """Switch to the model or server that the user chose, to a model also for the next start."""
        self._watch_setup()
        if chosen is None:
            return
        try:
            found = find(chosen) if isinstance(chosen, str) else chosen
            before = self._settings.settings.model
            self._chat.controller.model.switch(found)
        except FloeError as error:
            self._tell(error, "error")
            return
        if isinstance(found, Path):
            self._untried = (found, before)
            self._start_with(str(chosen))

    def _start_with(self, model: str) -> None:
        """Save which model the next start uses."""
        if self._file is not None and read(self._file).settings.model != model:
            self._save({"chat.model": model})


def _palette(chat: ChatScreen) -> Iterable[SystemCommand]:
    """Every command, and every preset."""
    for action in COMMANDS:
        usage = action.usage.replace("[", r"\[")  # Textual takes it for markup, and its escape() leaves capitals
        key = f"{key_of(chat, action.name)} · " if action.keys else ""
        yield SystemCommand(action.title, f"{key}{usage} · {action.does}", partial(chat.do, action.name))
    uses = f"{key_of(chat, 'next_preset')} goes to the next one · Use this quality from the next token on"
    model = chat.controller.model
    for preset in model.presets:
        yield SystemCommand(f"Preset: {preset}", uses, partial(model.choose_preset, preset))


def _setup_of_new(client: Client, sampling: Sampling, system_prompt: str, settings: Settings) -> ChatSetup:
    """The setup of a new chat; it names the settings' persona if that persona's system prompt is used."""
    setup = ChatSetup(client.reference, sampling=sampling, system_prompt=system_prompt)
    persona = settings.personas.get(settings.persona)
    if persona is not None and persona.system_prompt == setup.system_prompt:
        setup = replace(setup, persona=settings.persona)
    return setup


def _import_later() -> None:
    """Import what the first answer needs, while the user types the question."""
    import_module("floe_chat.app.widgets.markdown.markdown")


def run_app(terminal: Terminal, beginning: Beginning) -> int:
    """Show the chat until the user quits; returns the exit code.

    Raises:
        UsageError: a saved chat is to be opened, and the settings turn saving off.
    """
    chat, saving = beginning.chat, beginning.settings.save_history
    client = Engines(beginning.client, beginning.local)
    need_saving(beginning)
    history = History(history_file() if saving else None)
    app = FloeChatApp(
        client,
        sampling=beginning.sampling,
        max_new_tokens=beginning.max_tokens,
        system_prompt=beginning.system,
        history=history,
        settings=settings_file(),
        terminal=terminal,
        reopened=None if chat is None else Reopened(chat.id, beginning.own_model),
        named=not beginning.own_model or bool(client.remote),
    )

    def close() -> bool:
        saved = history.close_patiently()
        client.close()
        app.setups.close()
        return saved

    terminal.serve(app.leave, close)
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        code = app.run()
    finally:
        sys.setswitchinterval(before)
        terminal.screen_ended()
        saved = close()
    return code or 1 if code is None or not saved else code
