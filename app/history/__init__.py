"""Conversations, saved on this machine and nowhere else.

A conversation is a tree of messages, each linked to the one before it (its parent), and a head: the last message of
the branch that is shown. Asking or answering again under the same parent makes a sibling, so that nothing is ever
overwritten. One SQLite file holds all of them; `schema.py` has its tables.

`History` (`live.py`) is for the screen, `open_history` for commands that do one thing and end. Both read by `Reader`
(`reading.py`) and write by `Store` (`store.py`); a `Writer` (`writer.py`) is the thread between the two.
"""

from .answer import Answer
from .attachments import read_attachment
from .database.opening import OpenedHistory, history_file, open_history
from .events import Changed, HistoryEvent, HistoryTrouble, Ready, Recovered
from .exporting import as_json, as_markdown, file_name, footer, json_text
from .importing import parse
from .live import History
from .records import (
    AnswerStats,
    Attachment,
    ChatSetup,
    Conversation,
    Hit,
    Message,
    MessageState,
    Role,
    Summary,
    Tree,
    Unsent,
    new_id,
    shortened,
)

__all__ = [
    "Answer",
    "AnswerStats",
    "Attachment",
    "Changed",
    "ChatSetup",
    "Conversation",
    "History",
    "HistoryEvent",
    "HistoryTrouble",
    "Hit",
    "Message",
    "MessageState",
    "OpenedHistory",
    "Ready",
    "Recovered",
    "Role",
    "Summary",
    "Tree",
    "Unsent",
    "as_json",
    "as_markdown",
    "file_name",
    "footer",
    "history_file",
    "json_text",
    "new_id",
    "open_history",
    "parse",
    "read_attachment",
    "shortened",
]
