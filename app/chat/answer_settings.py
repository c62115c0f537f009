"""A chat's sampling values and persona, set by `/set temperature 0.3`, `/persona NAME`, or a form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from ...engine.events import Sampling
from ...engine.ranges import SAMPLING
from ...models.errors import UsageError
from ..history import ChatSetup
from ..settings.settings import Persona

NAMES = tuple(field.name for field in fields(Sampling))


def changed(sampling: Sampling, name: str, value: str) -> Sampling:
    """`sampling` with one value, given as it was typed.

    Raises:
        UsageError: no such name, or a value out of range.
    """
    if name not in NAMES:
        raise UsageError(f"There is no sampling value {name!r}", "", f"Choose one of {', '.join(NAMES)}.")
    if name == "seed" and value in ("", "none"):
        return replace(sampling, seed=None)
    try:
        return replace(sampling, **{name: SAMPLING[name].converted(value, typed=True)})
    except ValueError as error:
        cause = f"It must be {SAMPLING[name]}."
        raise UsageError(f"{name} cannot be {value!r}", cause, "Example: /set temperature 0.3") from error


def with_persona(setup: ChatSetup, personas: Mapping[str, Persona], name: str) -> ChatSetup:
    """`setup` with the system prompt and the sampling values of the persona `name`.

    Raises:
        UsageError: there is no such persona.
    """
    persona = personas.get(name)
    if persona is None:
        raise UsageError(f"There is no persona {name!r}", listed(personas), "Add personas to the settings file.")
    given = {field: value for field in NAMES if (value := getattr(persona, field, None)) is not None}
    sampling = replace(setup.sampling, **given)
    return replace(setup, system_prompt=persona.system_prompt, persona=name, sampling=sampling)


def listed(personas: Mapping[str, Persona]) -> str:
    """A sentence that lists the personas."""
    return f"Personas: {', '.join(personas)}." if personas else "No persona is set up yet."
