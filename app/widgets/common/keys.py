"""The keys of actions: as Textual binds them, and as people write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from textual.binding import Binding, BindingType
from textual.widget import Widget

from ...actions import ACTIONS, NAMED, OWN, Action, Scope


@runtime_checkable
class Keyed(Protocol):
    """A program in which the user can give keys to actions."""

    @property
    def given_keys(self) -> Mapping[str, str]:
        """The key of every action of `OWN`; several are separated by commas."""
        ...


def bindings(place: Scope) -> list[BindingType]:
    """The keys of all actions that work in `place`."""
    found: list[BindingType] = []
    for action in ACTIONS:
        if action.place is place and action.keys:
            # Before the text field's own keys: F6 would select a line there, and the user may choose any of them.
            first = place in (Scope.ANYWHERE, Scope.CHAT) and not action.yields
            own = action.name if action.name in OWN else None
            found.append(Binding(action.keys, called(action), action.does, show=False, priority=first, id=own))
    return found


def called(action: Action) -> str:
    """The function of `action`, for any widget of its place."""
    owner = {Scope.ANYWHERE: "app.", Scope.CHAT: "screen."}.get(action.place, "")
    return owner + (action.run or f"do('{action.name}')")


def closing(action: str, run: str = "dismiss") -> Binding:
    """The key that opens a page also closes it."""
    return Binding(NAMED[action].keys, run, "Close", show=False, id=action)


def key_of(widget: Widget, action: str) -> str:
    """The key of `action` as people write it: the user's, or the default."""
    app: object = widget.app
    given = app.given_keys if isinstance(app, Keyed) else {}
    return key_name(given.get(action, NAMED[action].keys))


def key_name(key: str) -> str:
    """A key as people write it: Ctrl+P, PageUp, F1; of several, the first."""
    key = key.split(",")[0]
    special = {"escape": "Esc", "pageup": "PageUp", "pagedown": "PageDown", "minus": "-", "plus": "+"}
    named = [special.get(part, part.capitalize()) for part in key.split("+")]
    return key if len(key) == 1 else "+".join(named)


def keys_in(place: Scope, given: Mapping[str, str]) -> list[tuple[str, str]]:
    """Keys that work in `place` and what they do, with the keys that the user has `given` to actions."""
    actions = [action for action in ACTIONS if action.place is place and action.keys and action.does]
    return [(_names(given.get(action.name, action.keys)), action.does) for action in actions]


def keys_of(bindings: Iterable[BindingType], given: Mapping[str, str]) -> list[tuple[str, str]]:
    """The same for the `bindings` of a page."""
    known = [one for one in bindings if isinstance(one, Binding) and one.description]
    return [(_names(given.get(one.id or "", one.key)), one.description) for one in known]


def _names(keys: str) -> str:
    return " · ".join(key_name(key) for key in keys.split(","))
