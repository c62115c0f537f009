"""The commands that show and change one chat's system prompt, persona and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from ..history.records import first_line
from ..settings.settings import Persona
from .answer_settings import changed, with_persona
from .dialogue import Dialogue
from .questions import Questions
from .view import View


class Setting:
    """Without an argument each command shows the current values."""

    def __init__(self, dialogue: Dialogue, questions: Questions, personas: Mapping[str, Persona], view: View) -> None:
        self._dialogue = dialogue
        self._questions = questions
        self._view = view
        self.personas = personas

    async def instruct(self, text: str) -> None:
        """Change the system prompt, or show it."""
        if not text:
            now = self._dialogue.setup.system_prompt
            await self._note(
                f"System prompt: {now}" if now else "This chat has no system prompt.", "/system TEXT sets it"
            )
            return
        self._dialogue.set_up(replace(self._dialogue.setup, system_prompt=text, persona=""))
        self._questions.show_name()
        self._view.gauges.remark("The new system prompt applies from the next question on")

    async def take_persona(self, name: str) -> None:
        """Use the system prompt and sampling values of a persona, or list all personas."""
        if not name:
            await self._list_personas()
            return
        self._dialogue.set_up(with_persona(self._dialogue.setup, self.personas, name))
        self._questions.show_name()
        self._view.gauges.remark(f"Persona {name} applies from the next question on")

    async def _list_personas(self) -> None:
        if not self.personas:
            await self._note(
                "There are no personas yet. A persona is a system prompt with a name; add one to the settings file:",
                "[personas.Tutor]",
                'system_prompt = "Explain in small steps."',
            )
            return
        now = self._dialogue.setup.persona
        lines = [
            f"{'●' if name == now else ' '} {name}: {first_line(persona.system_prompt) or 'no system prompt'}"
            for name, persona in self.personas.items()
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
        self._view.gauges.remark(f"{name} is {getattr(sampling, name)} from the next answer on")

    async def _note(self, *lines: str) -> None:
        await self._view.messages.note("\n".join(lines))
