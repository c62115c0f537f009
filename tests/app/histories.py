"""Histories to break, and a look at all that is in one."""

from __future__ import annotations

from pathlib import Path

from floe_chat.app.history import AnswerStats, Attachment, ChatSetup, new_id, open_history
from floe_chat.app.history.database.store import HistoryStore
from floe_chat.app.history.database.trouble import checked

SETUP = ChatSetup("demo", "Fast")
_FILLED: dict[tuple[int, int], bytes] = {}


def filled(file: Path, conversations: int = 4, messages: int = 30) -> None:
    """A history with some texts in it, closed; the same bytes each time."""
    if (conversations, messages) in _FILLED:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.write_bytes(_FILLED[conversations, messages])
        return
    store = open_history(file).store
    with store.transaction():
        for number in range(conversations):
            store.add_conversation(chat := new_id(), SETUP, f"chat {number}")
            parent = None
            for place in range(messages):
                message = new_id(parent or 0)
                text = f"chat {number} message {place} " + "lorem ipsum " * (place % 17)
                if place % 2 and parent is not None:
                    store.begin_answer(message, parent, "demo", "Fast", "")
                    store.end_answer(message, text, "complete", AnswerStats(3, 1.0, 0.1, "stop"))
                else:
                    store.add_question(message, chat, parent, text, [Attachment("a.txt", text)])
                parent = message
    store.close()
    checked(file).unlink()
    _FILLED[conversations, messages] = file.read_bytes()


def read_all(store: HistoryStore) -> int:
    """Read everything there is; the number of messages."""
    page, count = store.conversations(), 0
    while page:
        for each in page:
            tree = store.tree(each.id)
            count += len(tree.messages)
            store.messages(store.branch(tree.conversation.head))
        page = store.conversations(before=page[-1])
    store.search("lorem message")
    return count
