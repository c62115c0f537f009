"""What the models screen says of what runs, which keys it offers, and how a line's model is deleted."""

from __future__ import annotations

from ...models import catalog
from ...models.errors import AccessError, FloeError
from ..settings.servers import SavedServer, forget
from ..setup.flow import Setup
from ..setup.leftovers import clear
from ..setup.setups import PackCheck, Setups, remove
from ..widgets.setup.models import Model

_ENTER = {
    "installed": "Enter chats with it",
    "unfinished": "Enter continues",
    "left": "Enter says why",
    "server": "Enter chats with it",
    "available": "Enter sets it up",
}


def going(setups: Setups) -> list[str]:
    """Describes the running setup or check."""
    now, lines = None if setups.setup is None else setups.setup.progress(), list[str]()
    if now is not None:
        more = ": choose it and press Enter to chat with it" if now.state == "done" else ""
        more = f" · {now.step}" if now.state in ("looking", "working", "checking") else more
        lines.append(f"{setups.words()}{more}")
    if setups.check is not None:
        lines.append(told(setups.check))
    return lines


def keys(model: Model | None, setups: Setups, *, on_server_line: bool = False) -> list[str]:
    """The key hints while `model` is highlighted; None: a line that leads to another one, or to a server."""
    typed = "Enter types its address" if on_server_line else "Enter types its name"
    hints = [typed if model is None else _ENTER[model.kind]]
    if model is not None and model.kind == "installed":
        hints += ["V checks it"]
    if model is not None and model.kind != "available" and model.name != catalog.DEMO:
        hints += ["X deletes it"]
    if setups.busy:
        paused = setups.setup is not None and setups.setup.progress().state == "paused"
        hints += ["Space continues" if paused else "Space pauses", "S stops"]
    return hints


def refusal(model: Model, current: SavedServer | str | None) -> FloeError | None:
    """Why a model is not deleted while `current` answers the chat."""
    if model.name == catalog.DEMO:
        return FloeError("The demo model cannot be deleted", "It is part of floe-chat.")
    if (model.server or model.name) == current:
        return FloeError(f"{model.name} answers this chat", "", "Choose another model first (Enter), then delete it.")
    return None


def places(model: Model) -> list[str]:
    """What goes with it: folders, or a server's address."""
    if model.server is not None:
        return [model.server.url]
    unfinished = model.wish
    folders = [unfinished.place, unfinished.fetched] if unfinished else [model.folder] if model.folder else []
    return [str(folder) for folder in (model.left.paths if model.left is not None else folders)]


def again(model: Model) -> str:
    """What its deletion means, in sentences."""
    if model.server is not None:
        return "Its address and its key will be deleted here. Chats that it answered stay."
    return "This will be deleted, with everything in it. To use it again, it has to be set up again."


def delete(model: Model, setups: Setups, *, linked: bool = False) -> FloeError | None:
    """Delete it, or return why that is impossible. linked: see `remove`."""
    try:
        if model.server is not None:
            forget(model.server.name)
        elif model.wish is not None:
            setups.give_up(model.wish)
        elif model.left is not None:
            clear(model.left)
        else:
            if setups.check is not None and setups.check.name == model.name:
                setups.stop_check()
            remove(model.name, linked=linked)
    except FloeError as error:
        return error
    return None


def told(check: PackCheck) -> str:
    """A check's progress, or its result."""
    if check.state == "checking":
        return f"{check.name}: {check.step}"
    if check.error is not None:
        return f"{check.name} could not be checked: {check.error.title}. {check.error.cause}"
    if not check.damaged:
        return f"{check.name}: all files are intact."
    first = check.damaged[0]
    more = f", and {len(check.damaged) - 1} more" if len(check.damaged) > 1 else ""
    return (
        f"{check.name} is damaged: {first.file} ({first.cause}){more}. "
        f"Repair it with `floe-chat verify {check.name} --repair`, or delete it and set it up again."
    )


def may_be_tried_again(setup: Setup) -> bool:
    """Whether it failed for a temporary reason."""
    return setup.progress().state == "failed" and not isinstance(setup.error, AccessError)
