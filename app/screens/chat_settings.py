"""The settings of one chat: system prompt, persona, sampling and quality preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from ...models.errors import UsageError
from ..bridge import EngineBridge
from ..chat_setup import changed, with_persona
from ..history import History, Setup
from ..history.records import first_line
from ..settings import Persona
from ..widgets.blocks import Note
from .chats import Chats
from .setup import SetupScreen


class ChatSettings(Chats):
    """A chat whose settings commands show and change."""

    def __init__(
        self,
        bridge: EngineBridge,
        history: History,
        setup: Setup,
        max_new_tokens: int,
        personas: Mapping[str, Persona],
    ) -> None:
        super().__init__(bridge, history, setup, max_new_tokens)
        self._personas = personas

    async def instruct(self, text: str) -> None:
        """Change the system prompt, or show it."""
        if not text:
            now = self._dialogue.setup.system_prompt
            await self._note(
                f"System prompt: {now}" if now else "This chat has no system prompt.", "/system TEXT sets it"
            )
            return
        self._dialogue.set_up(replace(self._dialogue.setup, system_prompt=text, persona=""))
        self._show_name()
        self._status.remark("The new system prompt applies from the next question on")

    async def take_persona(self, name: str) -> None:
        """Use the system prompt and sampling values of a persona, or list all personas."""
        if not name:
            await self._list_personas()
            return
        self._dialogue.set_up(with_persona(self._dialogue.setup, self._personas, name))
        self._show_name()
        self._status.remark(f"Persona {name} applies from the next question on")

    async def _list_personas(self) -> None:
        if not self._personas:
            await self._note(
                "There are no personas yet. A persona is a system prompt with a name; add one to the settings file:",
                "[personas.Tutor]",
                'system_prompt = "Explain in small steps."',
            )
            return
        now = self._dialogue.setup.persona
        lines = [
            f"{'●' if name == now else ' '} {name}: {first_line(persona.system_prompt) or 'no system prompt'}"
            for name, persona in self._personas.items()
        ]
        await self._note("Personas:", *lines, "/persona NAME uses one")

    async def set_sampling(self, words: str) -> None:
        """Change how the next answers are drawn, or show the values."""
        sampling = self._dialogue.setup.sampling
        if not words:
            values = [
                f"{name} {'random' if value is None else f'{value:g}'}" for name, value in asdict(sampling).items()
            ]
            await self._note(
                f"Sampling: {', '.join(values)}", "/set NAME VALUE changes one, such as /set temperature 0.3"
            )
            return
        name, _space, value = words.partition(" ")
        sampling = changed(sampling, name, value.strip())
        self._dialogue.set_up(replace(self._dialogue.setup, sampling=sampling))
        self._status.remark(f"{name} is {getattr(sampling, name)} from the next answer on")

    async def _note(self, *lines: str) -> None:
        await self._transcript.add(Note("\n".join(lines)))

    def open_setup(self) -> None:
        """Show this chat's settings."""
        setup = self._dialogue.setup
        page = SetupScreen(self._dialogue.name, setup, self._personas, self._presets, self._wanted_preset)
        self.app.push_screen(page, self._set_up)

    def _set_up(self, chosen: tuple[str, Setup] | None) -> None:
        if chosen is not None:
            title, setup = chosen
            if title != self._dialogue.name:
                self._dialogue.rename(title)
            self._dialogue.set_up(setup)
            self._ask_for_its_quality()
            self._show_name()

    def take_preset(self, name: str) -> None:
        """Use a preset, by its name in any case, or list all presets."""
        known = ", ".join(f"{preset} (now)" if preset == self._status.preset else preset for preset in self.presets)
        if not name:
            self._status.remark(f"Presets: {known or 'known when the model is loaded'}")
            return
        preset = next((preset for preset in self.presets if preset.lower() == name.lower()), None)
        if preset is None and not self.presets:
            raise UsageError(f"This model has no preset {name!r}", "", "Its presets are known when it is loaded.")
        if preset is None:
            from ...engine import quality
            from ...models.manifest import Manifest

            preset = quality.get(name, Manifest.read(self._bridge.pack)).name  # which says why it has none
        self.choose_preset(preset)
