"""`floe-chat history`: data on stdout, talk on stderr, an exit code, and never a traceback."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import stat
from pathlib import Path

import pytest
from floe_chat.app.history import AnswerStats, Attachment, ChatSetup, history_file, new_id, open_history

from ..helpers import Ran, explained, run_cli

EVIL = "\x1b]0;owned\x07\x1b[2J\u202e"


def history(*arguments: object, terminal: bool = False) -> Ran:
    return run_cli("history", *map(str, arguments), terminal=terminal)


@pytest.fixture
def filled() -> Path:
    """Three conversations: 1 has two branches, 2 an evil title, 3 nothing in it."""
    store = open_history(history_file()).store
    with store.transaction():
        store.add_conversation(one := new_id(), ChatSetup("demo", "Fast"), created=1_000)
        store.add_question(q := new_id(), one, None, "What is an expert?", [Attachment("a.txt", "attached")])
        for text in ("A network.", "A small network."):
            store.begin_answer(a := new_id(), q, "demo", "Fast", "")
            store.end_answer(a, text, "complete", AnswerStats(3, 2.0, 0.5, "stop"))
        store.add_conversation(two := new_id(), ChatSetup("m\x1b[1m"), f"Title {EVIL}\nsecond line")
        store.add_question(new_id(), two, None, f"needle {EVIL} in hay", ())
        store.add_conversation(new_id(), ChatSetup())
    with store.transaction():
        store._connection.execute("UPDATE conversation SET updated = 1000 * number")  # pyright: ignore[reportPrivateUsage]
    store.close()
    return history_file()


def test_before_the_first_chat_there_is_nothing_and_nothing_is_made() -> None:
    ran = history("list")
    assert (ran.code, ran.out) == (0, "") and "no chat is saved yet" in ran.err
    assert history("search", "x").code == 1 and "no chat 1" in explained(history("show", "1"), 2).lower()
    assert not history_file().parent.exists()


def test_the_list_is_newest_first_in_columns(filled: Path) -> None:
    ran = history("list")
    lines = ran.out.splitlines()
    assert (ran.code, ran.err) == (0, "") and [int(line.split()[0]) for line in lines] == [3, 2, 1]
    assert lines[2].endswith("What is an expert?") and lines[2].split()[3:5] == ["2", "demo"]
    assert lines[0].endswith("Empty conversation")
    shorter = history("list", "-n", 1)
    assert len(shorter.out.splitlines()) == 1 and "--limit" in shorter.err
    rows = [json.loads(line) for line in history("list", "--json").out.splitlines()]
    assert [row["number"] for row in rows] == [3, 2, 1] and rows[1]["title"] == f"Title {EVIL}\nsecond line"
    began = "1970-01-01T00:00:01.000Z"
    row = {"number": 1, "title": "What is an expert?", "model": "demo", "messages": 2}
    assert rows[2] == row | {"created": began, "updated": began}


@pytest.mark.parametrize(
    "arguments",
    [
        *(["list"], ["list", "--json"], ["search", "needle"], ["search", "needle", "--json"], ["show", "2"]),
        *(["show", "2", "--json"], ["export", "2"], ["export", "2", "--format", "json"]),
    ],
    ids=" ".join,
)
def test_nothing_kept_reaches_the_terminal_as_a_command(filled: Path, arguments: list[str]) -> None:
    ran = history(*arguments, terminal=True)
    assert ran.code == 0 and ran.out
    bold = ran.out.replace("\x1b[1m", "").replace("\x1b[0m", "") if arguments == ["search", "needle"] else ran.out
    assert not any(char in bold for char in "\x1b\x07\u202e")


def test_search_finds_messages_on_every_branch(filled: Path) -> None:
    ran = history("search", "netw")
    assert (ran.code, ran.err) == (0, "")
    assert "message 2, another branch" in ran.out and "(message 2)" in ran.out and "A small network." in ran.out
    rows = [json.loads(line) for line in history("search", "small network", "--json").out.splitlines()]
    assert [(row["number"], row["position"], row["shown"]) for row in rows] == [(1, 1, True)]
    assert rows[0]["marks"] == [[2, 15]] and rows[0]["snippet"] == "A small network."
    assert "\x1b[1mneedle\x1b[0m" in history("search", "needle", terminal=True).out
    assert len(history("search", "network", "-n", "1").out.splitlines()) == 2
    nothing = history("search", "xylophone")
    assert (nothing.code, nothing.out) == (1, "") and "nothing found for" in nothing.err


def test_show_prints_the_branch(filled: Path) -> None:
    ran = history("show", 1)
    assert (ran.code, ran.err) == (0, "") and ran.out.startswith("# What is an expert?\n")
    assert "A small network." in ran.out and "A network." not in ran.out
    rows = [json.loads(line) for line in history("show", 1, "--json").out.splitlines()]
    assert [(row["role"], row["position"], row["sibling"], row["siblings"]) for row in rows] == [
        *(("user", 0, 1, 1), ("assistant", 1, 2, 2))
    ]
    assert rows[1]["stats"]["tokens_per_s"] == 2.0 and rows[0]["attachments"] == [{"name": "a.txt", "text": "attached"}]


def test_export_and_import_keep_everything(filled: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup.json"
    wrote = history("export", "--all", "--format", "json", "-o", backup)
    assert (wrote.code, wrote.out) == (0, "") and str(backup) in wrote.err
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    imported = history("import", backup)
    assert (imported.code, imported.out) == (0, "4\n5\n6\n") and "imported 3 chats" in imported.err
    document = json.loads(backup.read_text())
    for number in (4, 5, 6):
        (again,) = json.loads(history("export", number, "--format", "json").out)["conversations"]
        assert again in document["conversations"]


def test_export_writes_one_file_each_into_a_folder_and_replaces_none(filled: Path, tmp_path: Path) -> None:
    assert history("export", 1, 2, "-o", tmp_path).code == 0
    names = sorted(path.name for path in tmp_path.glob("*.md"))
    assert names == ["1-what-is-an-expert.md", "2-title-0-owned-2j-second-line.md"]
    assert "exists" in explained(history("export", 1, "-o", tmp_path), 2)
    assert history("export", 1, "-o", tmp_path, "--force").code == 0
    assert "cannot be written" in explained(history("export", 1, "-o", tmp_path / "no" / "such"), 2)
    assert history("export", 1).out == (tmp_path / "1-what-is-an-expert.md").read_text()


def test_export_makes_the_folder_that_a_slash_names(filled: Path, tmp_path: Path) -> None:
    assert history("export", 1, 3, "-o", f"{tmp_path}/new/chats/").code == 0
    names = sorted(path.name for path in (tmp_path / "new" / "chats").iterdir())
    assert names == ["1-what-is-an-expert.md", "3-empty-conversation.md"]
    assert "cannot be created" in explained(history("export", 1, "-o", f"{tmp_path}/new/chats/{names[0]}/"), 2)


def test_export_to_a_dash_is_stdout_and_to_nothing_is_refused(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert history("export", 1, "-o", "-").out == history("export", 1).out != ""
    assert "empty" in explained(history("export", 1, "-o", ""), 2)
    assert not list(tmp_path.iterdir())
    assert history("export").code == 2 and history("export", 1, "--all").code == 2
    assert "no chat 77" in explained(history("export", 1, 77), 2).lower()


def test_an_endless_title_is_cut(filled: Path) -> None:
    store = open_history(history_file()).store
    with store.transaction():
        store.rename(store.numbered(1).id, f"needle{'x' * 100_000} haystack")
        store.rename(store.numbered(3).id, f"haystack {'y ' * 50_000}")
    store.close()
    for arguments in (["list"], ["search", "needle"], ["search", "haystack"]):
        for terminal in (False, True):
            ran = history(*arguments, terminal=terminal)
            assert ran.code == 0 and max(map(len, ran.out.splitlines())) < 500


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is written gets to the disk."""

    def refuse(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("floe_chat.models.private_file.os.fsync", refuse)


@pytest.mark.parametrize("force", [False, True], ids=["new", "force"])
def test_an_export_that_finds_no_room_leaves_what_was_there(
    filled: Path, tmp_path: Path, full_disk: None, force: bool
) -> None:
    folder = tmp_path / "backups"
    folder.mkdir()
    before = {"backup.json": "the good one"} if force else {}
    for name, text in before.items():
        (folder / name).write_text(text)
    err = explained(history("export", 1, "-o", folder / "backup.json", *(["--force"] if force else [])), 1)
    assert "no room" in err and "Free some space" in err
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


def test_an_export_by_force_is_private_and_follows_a_link(filled: Path, tmp_path: Path) -> None:
    there, link = tmp_path / "there.md", tmp_path / "link.md"
    there.write_text("before")
    there.chmod(0o644)
    link.symlink_to(there)
    assert history("export", 1, "-o", link, "--force").code == 0
    assert link.is_symlink() and there.read_text().startswith("# What is an expert?")
    assert stat.S_IMODE(there.stat().st_mode) == 0o600
    assert history("export", 1, "-o", os.devnull, "--force").code == 0 and not Path(os.devnull).is_file()


def test_values_that_were_kept_and_that_no_import_takes_are_left_out_and_told(filled: Path, tmp_path: Path) -> None:
    store = open_history(history_file()).store
    sql = """UPDATE conversation SET sampling = '{"temperature": 0.5, "repetition_penalty": Infinity, "min_p": NaN}',
        quality = '{"sparsity": NaN}' WHERE number = 1"""
    store._connection.execute(sql)  # pyright: ignore[reportPrivateUsage]
    store._connection.execute('UPDATE message SET stats = \'{"tokens": 1, "tokens_per_s": Infinity}\'')  # pyright: ignore[reportPrivateUsage]
    store.close()
    backup = tmp_path / "backup.json"
    wrote = history("export", "--all", "--format", "json", "-o", backup)
    assert wrote.code == 0 and "chat 1: sampling values out of range" in wrote.err
    assert wrote.err.count("out of range") == 1 and "Infinity" not in backup.read_text()
    imported = history("import", backup)
    assert (imported.code, imported.out) == (0, "4\n5\n6\n")
    assert json.loads(backup.read_text())["conversations"][2]["sampling"]["temperature"] == 0.5


def test_import_refuses_and_adds_nothing(filled: Path, tmp_path: Path) -> None:
    document = json.loads(history("export", "--all", "--format", "json").out)
    document["conversations"][2]["messages"] = [{"id": 1}]
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(document))
    assert "conversations[2].messages[0].attachments is missing" in explained(history("import", bad), 2)
    bad.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in explained(history("import", bad), 2)
    assert "cannot be read" in explained(history("import", tmp_path), 2)
    assert len(history("list").out.splitlines()) == 3


def test_delete_takes_all_or_none_and_undo_brings_them_back(filled: Path) -> None:
    assert "no chat 77" in explained(history("delete", 1, 77), 2).lower()
    assert len(history("list").out.splitlines()) == 3
    gone = history("delete", 1, 2, 2)
    assert (gone.code, gone.out) == (0, "") and "1, 2 deleted" in gone.err
    assert [line.split()[0] for line in history("list").out.splitlines()] == ["3"]
    assert history("search", "network").code == 1
    assert history("delete", 1, "--undo").code == 0 and history("search", "network").code == 0
    assert "cannot be restored" in explained(history("delete", 3, "--undo"), 2)
    assert "cannot be restored" in explained(history("delete", 99, "--undo"), 2)


def test_a_damaged_history_is_told_on_stderr(filled: Path) -> None:
    filled.write_bytes(b"no database at all, but long enough to be taken for one " * 40)
    ran = history("list")
    assert (ran.code, ran.out) == (0, "") and "The history was damaged" in ran.err and "-damaged-" in ran.err
    assert history("list").err.count("damaged") == 0


def test_a_lock_asks_to_try_again(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floe_chat.app.history.database.opening.BUSY_SECONDS", 0.05)
    lock = sqlite3.connect(filled, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    assert "locked" in explained(history("delete", 1), 3)
    for arguments in (["list"], ["search", "needle"], ["show", 1], ["export", 1]):
        ran = history(*arguments)
        assert (ran.code, ran.err) == (0, "") and ran.out  # who only reads need not wait
    lock.close()


def test_numbers_that_are_none_are_usage_errors(filled: Path) -> None:
    for arguments in (["show"], ["delete"], ["search"], ["list", "-n", "0"]):
        assert history(*arguments).code == 2, arguments
    for number in ("0", "x", "²", "1.5", "9" * 5000):
        ran = history("show", number)
        assert ran.code == 2 and "is not a chat number" in ran.err and len(ran.err) < 400
    assert os.path.lexists(filled)
