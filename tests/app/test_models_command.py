"""`floe-chat models` with `serve-with`, and `floe-chat paths`."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from floe_chat.app.cli.main import cli
from floe_chat.app.setup.wish import Wish
from floe_chat.models import catalog
from floe_chat.models.errors import UsageError
from floe_chat.models.pack import usage_file
from floe_chat.models.packing.pack import PackSpec

from ..helpers import make_checkpoint, make_pack, run_cli


def run(*words: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(cli, list(words), input=answer)


def refused(*words: str) -> UsageError:
    error = CliRunner().invoke(cli, list(words), standalone_mode=False).exception
    assert isinstance(error, UsageError), error
    return error


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A pack that is called tiny, beside one that was only begun."""
    make_pack(make_checkpoint(tmp_path / "source", layers=1), catalog.models_folder() / "tiny", PackSpec())
    begun = Wish("floe/other", "other")
    begun.folder.mkdir()
    (begun.folder / "packing.json").write_text("{}")
    (catalog.models_folder() / "other.setup.json").write_text(
        json.dumps({"model": begun.model, "name": begun.name, "up": 3, "gate": 4, "down": 4, "dense": 4, "commit": ""})
    )
    return catalog.models_folder() / "tiny"


def test_lists_installed_begun_and_listed(tiny: Path) -> None:
    found: dict[str, Any] = json.loads(run("models", "--json").stdout)
    assert [(one["name"], one["trouble"]) for one in found["installed"]] == [("demo", None), ("tiny", None)]
    assert found["installed"][1]["bytes"] > 1000 and found["installed"][1]["folder"] == str(tiny)
    assert [one["name"] for one in found["unfinished"]] == ["other"]
    assert [one["name"] for one in found["listed"]] == [entry.name for entry in catalog.PUBLISHED]
    text = run("models").stdout
    assert "tiny" in text and "so far, floe/other" in text and "mistralai/Mixtral-8x7B-Instruct-v0.1" in text


def test_removes_what_was_asked_for_and_nothing_else(tiny: Path) -> None:
    used, others = usage_file.file_of(tiny), usage_file.file_of(tiny / "other")
    for file in (used, others):
        usage_file.write(file, usage_file.from_popularity(np.ones((1, 4)), 8))
    assert "--yes" in refused("models", "remove", "tiny").hint and tiny.exists() and used.exists()
    done = run("models", "remove", "tiny", "--yes")
    assert done.exit_code == 0 and "deleted tiny" in done.stderr
    assert not tiny.exists() and (catalog.models_folder() / "other").exists()
    assert not used.exists() and others.exists()  # what a person asked about can be guessed from it
    assert run("models", "remove", "other", "-y").exit_code == 0
    assert list(catalog.models_folder().iterdir()) == []


@pytest.mark.parametrize("name", ["demo", "absent", "..", "/etc", ""])
def test_refuses_to_remove_what_is_no_model_of_the_folder(name: str) -> None:
    assert "to remove" in refused("models", "remove", name, "--yes").title
    assert catalog.find("demo").exists()


def test_paths(own_folders: Path) -> None:
    found = json.loads(run("paths", "--json").stdout)
    assert list(found) == ["settings", "history", "models", "cache", "states", "log"]
    assert all(Path(path).is_relative_to(own_folders) for path in found.values())
    assert found["models"] == str(catalog.models_folder())
    assert [line.split()[0] for line in run("paths").stdout.splitlines()] == list(found)


# `floe-chat models serve-with`: the lines that serve the same checkpoint elsewhere, and the memory for it


def engines(*words: str) -> dict[str, Any]:
    ran = run_cli("models", "serve-with", *words, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def options(line: str) -> dict[str, str]:
    words = shlex.split(line)
    return {name: value for name, value in pairwise(words) if name.startswith("-")}


def test_a_listed_model() -> None:
    found = engines("mixtral-8x7b-instruct", "--context", "4096")
    assert found["checkpoint"] == "mistralai/Mixtral-8x7B-Instruct-v0.1"
    vllm, sglang, llama = found["engines"]
    assert vllm["lines"][0].startswith("vllm serve mistralai/Mixtral-8x7B-Instruct-v0.1 ")
    assert options(vllm["lines"][0])["--max-model-len"] == "4096"
    assert options(sglang["lines"][0])["--model-path"] == found["checkpoint"]
    assert options(sglang["lines"][0])["--context-length"] == "4096"
    assert options(llama["lines"][-1])["-c"] == "4096" and len(llama["lines"]) == 4
    # 46.7 billion weights of 16 bits; keys and values of 32 layers, 8 heads of 128, 4,096 tokens.
    weights, kept = 2 * 46_702_792_704, 4096 * 2 * 2 * 32 * 8 * 128
    assert vllm["bytes"] == sglang["bytes"] == weights + kept + (2 << 30)
    assert llama["bytes"] == pytest.approx(46_702_792_704 * 4.85 / 8 + kept + (1 << 29))
    line = engines("mixtral-8x7b-instruct", "--context", "9999999")["engines"][0]["lines"][0]
    assert options(line)["--max-model-len"] == "32768"  # the model's, at most


def test_a_folder_needs_no_download(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a model")
    found = engines(str(folder))
    assert found["checkpoint"] == str(folder)
    vllm, _sglang, llama = found["engines"]
    assert shlex.split(vllm["lines"][0])[2] == str(folder)
    assert [line.split()[0] for line in llama["lines"]] == ["python", "llama-quantize", "llama-server"]
    assert shlex.split(llama["lines"][0])[2] == str(folder)


def test_a_pack_names_its_source(tmp_path: Path) -> None:
    pack = catalog.models_folder() / "tiny"
    make_pack(make_checkpoint(tmp_path / "source", layers=1), pack, PackSpec())
    ran = run_cli("models", "serve-with", "tiny")
    assert ran.code == 2 and "The checkpoint of tiny is not known" in ran.err and "made from source" in ran.err


def test_text_says_that_it_is_an_estimate() -> None:
    ran = run_cli("models", "serve-with", "qwen3-30b-a3b")
    assert ran.code == 0 and ran.out.count("(an estimate)") == 3
    assert "floe-chat --connect http://127.0.0.1:8000" in ran.out
    assert run_cli("models", "serve-with", "nonsense").code == 2
