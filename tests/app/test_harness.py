"""`floe-chat harness`: the same figures as the harness's own model of the checkpoint, and what it refuses."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import string
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from floe_chat.engine.loader import load
from floe_chat.models.errors import FloeError, UsageError

from ..helpers import Ran, edit_json, explained, reseal, run_cli

if TYPE_CHECKING:
    from floe_chat.app.cli.harness.harness_model import PackLM
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

TEXT = "A crane stood with its arm raised against a grey sky – and nobody came. "
LONG = TEXT * 20  # 1480 tokens of the test's tokenizer, which has one per byte; the window is 512
FIELDS = {
    *("version", "lm_eval", "model", "source", "widths", "device", "backend", "window", "chat", "limit", "cut"),
    *("presets", "figures", "rule", "lenient", "kv_bits", "notes"),
}
FIGURE = {"task", "metric", "filter", "preset", "value", "stderr", "higher_is_better", "samples", "fewshot"}

CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "fewshot_split": "test",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
ANSWER = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "x",
    "generation_kwargs": {"until": ["e"], "max_gen_toks": 12},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": name} for name in ("word_perplexity", "bits_per_byte")],
}
DIALLED = ("--sparsity 70%", "--sparsity 70% --lenient", "--product 80%", "--drop 90%", "--major 90%", "--alpha 90%")
QUESTIONS = [
    {"question": f"What is {n}?", "choices": ["a router", "an expert of the layer", "nothing"], "answer": n % 3}
    for n in range(9)
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the library keeps the data it has read; it was imported before any test had a home of its own."""

    from datasets import config as datasets_config

    folder = tmp_path_factory.mktemp("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets_config, "HF_DATASETS_CACHE", folder)
        yield folder


def write_task(folder: Path, name: str, fields: dict[str, Any], docs: list[dict[str, Any]]) -> None:
    """A task and its data, beside each other; JSON is YAML."""
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, docs)), encoding="utf-8")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}}, "test_split": "test"}
    task = json.dumps({"task": name, **data, **fields}).replace('"!score"', "!function scoring.score")
    (folder / f"{name}.yaml").write_text(task, encoding="utf-8")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of each kind, in a folder that is not the current one."""
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder, "tiny_choice", CHOICE, QUESTIONS)
    write_task(folder, "tiny_answer", ANSWER, QUESTIONS)
    write_task(folder, "tiny_text", ROLLING, [{"text": LONG}, {"text": TEXT}])
    return folder


def run_harness(pack: Path | str, folder: Path, *options: str) -> Ran:
    return run_cli("harness", str(pack), "--tasks-folder", str(folder), "--device", "cpu", *options)


def by_transformers(checkpoint: Path) -> HFLM:
    """The harness's own model, computing in float32."""

    from lm_eval.models.huggingface import HFLM

    make: Any = HFLM  # its registration hides what it takes
    return make(pretrained=str(checkpoint), dtype="float32", device="cpu")


def test_the_figures_are_those_of_the_harness_itself(tiny_checkpoint: Path, exact_pack: Path, tasks: Path) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    names = ["tiny_choice", "tiny_answer", "tiny_text"]
    ran = run_harness(exact_pack, tasks, "-t", ",".join(names), "-p", "Exact", "--fewshot", "2", "--json")
    assert (ran.code, ran.err) == (0, "")
    found: dict[str, Any] = json.loads(ran.out)
    assert set(found) == FIELDS and found["presets"] == ["Exact"] and all(set(f) == FIGURE for f in found["figures"])
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    here = Path.cwd()
    os.chdir(tasks)
    try:
        theirs: Any = simple_evaluate(
            model=by_transformers(tiny_checkpoint),
            tasks=list(names),
            num_fewshot=2,
            task_manager=manager,
            log_samples=False,
        )
    finally:
        os.chdir(here)
    for figure in found["figures"]:
        right = theirs["results"][figure["task"]]
        assert figure["value"] == pytest.approx(right[f"{figure['metric']},{figure['filter']}"], rel=1e-4), figure
        stderr = right[f"{figure['metric']}_stderr,{figure['filter']}"]
        assert figure["stderr"] == (pytest.approx(stderr, rel=1e-4) if isinstance(stderr, float) else None), figure
    assert {figure["task"]: (figure["samples"], figure["fewshot"]) for figure in found["figures"]} == {
        "tiny_choice": (9, 2),
        "tiny_answer": (9, 2),
        "tiny_text": (2, 2),
    }


def test_the_table_has_the_figures_of_the_json(tiny_pack: Path, tasks: Path) -> None:
    options = ("--tasks", "tiny_ch*, tiny_text", "--limit", "4", "--chat")
    ran = run_harness(tiny_pack, tasks, *options, "-p", "fast", "-p", "no sparsity")
    assert (ran.code, ran.err.splitlines()) == (0, [])
    lines = ran.out.splitlines()
    assert "{" not in ran.out
    again = run_harness(tiny_pack, tasks, *options, "-p", "fast", "-p", "no sparsity", "--json")
    found: dict[str, Any] = json.loads(again.out)
    assert found["presets"] == ["No sparsity", "Fast"] and (found["limit"], found["chat"]) == (4, True)
    assert max(map(len, lines)) <= 100 and "tiny_choice  (4 samples, 0 shots)" in lines
    (row,) = (line.split() for line in lines if line.startswith("  bits_per_byte"))
    figures = {f["preset"]: f for f in found["figures"] if f["metric"] == "bits_per_byte"}
    assert [float(part) for part in row[1:]] == pytest.approx([figures[p]["value"] for p in found["presets"]], rel=1e-3)
    assert figures["No sparsity"]["value"] != figures["Fast"]["value"], "each preset is measured"


@pytest.mark.thorough
def test_every_dial_of_eval_is_measured(tiny_pack: Path, tasks: Path) -> None:
    def measured(*options: str) -> dict[str, float]:
        ran = run_harness(tiny_pack, tasks, "--tasks", "tiny_text", "--limit", "1", "--json", *options)
        assert ran.code == 0, ran.err
        found = json.loads(ran.out)
        assert list(found["presets"]) == [f["preset"] for f in found["figures"] if f["metric"] == "bits_per_byte"]
        return {f["preset"]: f["value"] for f in found["figures"] if f["metric"] == "bits_per_byte"}

    plain = measured("-p", "no sparsity", "-p", "floe80", "--sparsity", "0")
    assert list(plain) == ["No sparsity", "FloE 80 %", "Custom"]
    assert plain["Custom"] == pytest.approx(plain["No sparsity"], rel=1e-5) and plain["FloE 80 %"] != plain["Custom"]
    others = [measured(*options.split())["Custom"] for options in DIALLED]
    assert len({*others, plain["Custom"]}) == len(DIALLED) + 1, "each dial changes something"
    stored = {bits: measured("-p", "no sparsity", "--kv-bits", bits)["No sparsity"] for bits in ("16", "8")}
    assert stored["16"] == pytest.approx(plain["No sparsity"], rel=1e-3)
    assert stored["8"] == pytest.approx(stored["16"], rel=0.02) and stored["8"] != stored["16"]


def test_requests_that_were_cut_are_told(tiny_pack: Path, tmp_path: Path) -> None:
    write_task(tmp_path, "tiny_long", CHOICE, [{"question": LONG, "choices": ["a", "b"], "answer": 0}])
    ran = run_harness(tiny_pack, tmp_path, "--tasks", "tiny_long", "--json")
    assert ran.code == 0 and json.loads(ran.out)["cut"] == 2
    assert ran.err == "floe-chat: 2 requests were longer than the window of 512 tokens. Their beginning was cut off.\n"


def test_groups_and_names_that_mean_nothing(
    tiny_pack: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the harness's own tasks those of ARC alone: to read all 14,000 takes ten seconds and more.
    from lm_eval.tasks import manager as tasks_manager

    installed = Path(str(tasks_manager.__file__)).parent
    shutil.copytree(installed / "arc", tmp_path / "installed" / "arc")
    monkeypatch.setattr(tasks_manager, "__file__", str(tmp_path / "installed" / "manager.py"))
    folder = Path(shutil.copytree(tasks, tmp_path / "tasks"))
    group = {"group": "tiny_all", "task": ["tiny_choice"], "aggregate_metric_list": [{"metric": "acc"}]}
    (folder / "group.yaml").write_text(json.dumps(group))
    ran = run_harness(tiny_pack, folder, "--tasks", "tiny_all", "--json")
    assert ran.code == 0, ran.err
    rows = {figure["task"]: figure for figure in json.loads(ran.out)["figures"] if figure["metric"] == "acc"}
    assert rows["tiny_all"]["value"] == rows["tiny_choice"]["value"] and rows["tiny_all"]["samples"] is None
    told = explained(run_harness(tiny_pack, folder, "--tasks", "tiny_chioce,arc_esay"), 2)
    assert "no task tiny_chioce, arc_esay" in told and "tiny_choice" in told and "arc_easy" in told


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("", "--tasks"),
        ("--tasks ,", "no task to run"),
        ("--tasks tiny_choice --preset Best", "Balanced"),
        ("--tasks tiny_choice --limit 0", "--limit"),
        ("--tasks tiny_choice --tasks-folder nonesuch", "no folder nonesuch"),
        ("--tasks tiny_choice --alpha 30% --kv-bits 8", "cannot be measured together"),
    ],
)
def test_bad_options_are_explained(tiny_pack: Path, tasks: Path, options: str, part: str) -> None:
    assert part in explained(run_harness(tiny_pack, tasks, *options.split()), 2)


def test_a_papers_table_about_tasks_answers_them_by_its_rules(tiny_pack: Path, tasks: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(LONG, encoding="utf-8")
    options = ("--tasks", "tiny_text,tiny_choice", "--tasks-folder", str(tasks), "--json")
    given = (str(tiny_pack), "--text", str(tmp_path / "text.txt"), "--tokens", "512", *options)
    ran = run_cli("paper", "dualsparse-t2", *given)
    assert ran.code == 0, ran.err
    grid = json.loads(ran.out)["made"]["grids"][1]
    assert sorted(grid["columns"]) == ["tiny_choice", "tiny_text"] and list(grid["rows"])[:2] == ["no drop", "1T"]
    whole = json.loads(run_harness(tiny_pack, tasks, *options[:2], "-p", "no sparsity", "--json").out)["figures"]
    values = {figure["task"]: figure["value"] for figure in reversed(whole)}
    found = dict(zip(grid["columns"], grid["rows"]["no drop"], strict=True))
    assert found == pytest.approx(values, rel=1e-4)
    assert grid["rows"]["1T"] != grid["rows"]["no drop"], "each rule is measured"
    assert "not about tasks" in explained(run_cli("paper", "floe-t6", *given), 2)


def test_without_the_harness_it_says_how_to_install_it(
    tiny_pack: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lm_eval", "lm_eval.evaluator"):
        monkeypatch.setitem(sys.modules, name, None)
    told = explained(run_harness(tiny_pack, tasks, "--tasks", "tiny_choice"), 1)
    assert "pip install 'floe-chat[harness]'" in told and "pip install lm-eval" in told


def test_a_base_model_has_no_chat_template(tiny_pack: Path, tasks: Path, tmp_path: Path) -> None:
    pack = Path(shutil.copytree(tiny_pack, tmp_path / "pack"))
    edit_json(pack / "tokenizer_config.json", lambda fields: fields.pop("chat_template"))
    (pack / "generation_config.json").unlink()
    reseal(pack)
    assert run_harness(pack, tasks, "--tasks", "tiny_answer", "--limit", "1").code == 0
    assert "Leave out --chat" in explained(run_harness(pack, tasks, "--tasks", "tiny_choice", "--chat"), 2)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"dataset_kwargs": {"data_files": {"test": "nonesuch.jsonl"}}}, "nonesuch.jsonl"),
        ({"doc_to_text": "{{"}, "Template"),
        ({"dataset_path": "floe/nonesuch", "dataset_kwargs": {}}, "Add --download"),
    ],
    ids=["no data", "template", "data on the Hub"],
)
def test_tasks_that_cannot_be_run(tiny_pack: Path, tmp_path: Path, change: dict[str, Any], part: str) -> None:
    write_task(tmp_path, "tiny_bad", CHOICE | change, QUESTIONS)
    assert part in explained(run_harness(tiny_pack, tmp_path, "--tasks", "tiny_bad"), 1)


SCORING = """
import socket

def score(doc, results):
    socket.create_connection(("192.0.2.1", 80), timeout=1)
"""


def test_a_task_may_not_reach_the_network_by_itself(tiny_pack: Path, tmp_path: Path) -> None:
    (tmp_path / "scoring.py").write_text(SCORING)
    write_task(tmp_path, "tiny_curious", ANSWER | {"process_results": "!score"}, QUESTIONS)
    told = explained(run_harness(tiny_pack, tmp_path, "--tasks", "tiny_curious", "--limit", "1"), 1)
    assert "needs the network" in told and "Add --download" in told


METRICS = [{"metric": "floe/nonesuch", "hf_evaluate": True, "aggregation": "mean"}]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"unsafe_code": True}, "code that the model writes"),
        # It imports the library of metrics first.
        pytest.param({"metric_list": METRICS}, "floe/nonesuch, code", marks=pytest.mark.thorough),
    ],
    ids=["answers", "metric"],
)
def test_tasks_that_run_programs_are_refused(
    tiny_pack: Path, tmp_path: Path, change: dict[str, Any], part: str
) -> None:
    write_task(tmp_path, "tiny_unsafe", ANSWER | change, QUESTIONS)
    assert part in explained(run_harness(tiny_pack, tmp_path, "--tasks", "tiny_unsafe"), 2)


def test_a_library_that_would_run_programs_is_too_old(
    tiny_pack: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from floe_chat.app.cli.harness import harness_tasks

    monkeypatch.setattr(harness_tasks, "SCRIPTLESS", 1000)
    told = explained(run_harness(tiny_pack, tasks, "--tasks", "tiny_choice"), 1)
    assert "too old" in told and "pip install 'datasets>=1000'" in told


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face Hub as a data set of one file, floe/tiny, takes."""

    asked: ClassVar[list[str]] = []
    commit = "a" * 40
    data = json.dumps(QUESTIONS[0]).encode()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        file = {"type": "file", "path": "test.jsonl", "oid": self.commit, "size": len(self.data)}
        about = {"id": "floe/tiny", "sha": self.commit, "siblings": [{"rfilename": "test.jsonl"}], "tags": []}
        answers = {
            "/api/datasets/floe/tiny": json.dumps(about).encode(),
            f"/api/datasets/floe/tiny/revision/{self.commit}": json.dumps(about).encode(),
            f"/api/datasets/floe/tiny/tree/{self.commit}": json.dumps([file]).encode(),
            f"/datasets/floe/tiny/resolve/{self.commit}/test.jsonl": self.data,
        }
        body = answers.get(path, b"")
        self.send_response(200 if body else 404)
        headers = {"ETag": f'"{self.commit}"', "X-Repo-Commit": self.commit, "Content-Length": str(len(body))}
        for name, value in (headers | ({} if body else {"X-Error-Code": "EntryNotFound"})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = _answer  # noqa: N815 - the library's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Not onto the test's output."""


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a server in the Hub's place."""
    Hub.asked.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def run_beside(hub: str, cache: Path, pack: Path, folder: Path, *options: str) -> Ran:
    """`floe-chat harness` in a process of its own, whose libraries find the Hub at `hub`, and our cache."""
    command = [sys.executable, "-c", "from floe_chat.app.cli.main import main; main()", "harness", str(pack)]
    command += ["--tasks", "tiny_far", "--tasks-folder", str(folder), *options]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": hub, "HF_DATASETS_CACHE": str(cache)}
    done = subprocess.run(command, env=clean | own, capture_output=True, text=True)
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.mark.thorough
def test_data_is_fetched_only_when_the_person_allows_it_and_kept(
    tiny_pack: Path, tmp_path: Path, hub: str, cache: Path
) -> None:
    write_task(tmp_path, "tiny_far", CHOICE | {"dataset_path": "floe/tiny", "dataset_kwargs": {}}, [])
    told = explained(run_beside(hub, cache, tiny_pack, tmp_path), 1)
    assert "floe/tiny" in told and "Add --download" in told and not Hub.asked
    ran = run_beside(hub, cache, tiny_pack, tmp_path, "--download", "--json")
    assert (ran.code, ran.err) == (0, ""), ran.err
    assert any(path.endswith("/test.jsonl") for path in Hub.asked)
    assert all("/floe/tiny" in path for path in Hub.asked), f"it asked for something else too: {Hub.asked}"
    again = run_harness(tiny_pack, tmp_path, "--tasks", "tiny_far", "--json")
    assert again == ran


# The class that the harness calls, beside the harness's own for transformers models


@pytest.fixture(scope="module", params=["plain", "start token"])
def both(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, exact_pack: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PackLM, HFLM]:
    """The pack without rounding through our class, the checkpoint through theirs; with both kinds of tokenizer."""

    from floe_chat.app.cli.harness.harness_model import PackLM, read_tokenizer

    checkpoint, pack = tiny_checkpoint, exact_pack
    if request.param == "start token":
        base = tmp_path_factory.mktemp("start")
        checkpoint = Path(shutil.copytree(tiny_checkpoint, base / "checkpoint"))
        pack = Path(shutil.copytree(exact_pack, base / "pack"))
        start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        processor = {
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        }
        for folder in (checkpoint, pack):
            edit_json(folder / "tokenizer.json", lambda fields: fields.update(post_processor=processor))
        reseal(pack)
    theirs = by_transformers(checkpoint)
    loaded, _ = load(pack, "Exact", "cpu", lambda _step, _share: None, library=True)
    ours = PackLM(loaded, *read_tokenizer(pack), told=lambda _step: None)
    assert ours.tok_encode("A")[:1] == ([1] if request.param == "start token" else ours.tok_encode("A"))
    return ours, theirs


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, 0, ("task", index, 1)) for index, args in enumerate(arguments)]


@pytest.mark.some(2)
@pytest.mark.parametrize("chunk", [1024, 100], ids=["one pass", "several passes"])
def test_likelihoods_are_those_of_transformers(
    both: tuple[PackLM, HFLM], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from floe_chat.app.cli.harness import harness_model

    ours, theirs = both
    monkeypatch.setattr(harness_model, "CHUNK", chunk)
    wanted = requests(
        "loglikelihood",
        *((TEXT[:length], char) for length in (2, 7, 13) for char in string.ascii_letters + string.punctuation),
        ("Spaces go to the right  ", "side"),
        ("", TEXT),
        ("", "<s>again"),
        ("<s>[INST] Hi [/INST]", "Hello"),
        ("Grüße – 你", "好"),
        (LONG, "the end"),
        ("the beginning", LONG[:490]),
        ("\n", "after nothing"),
    )
    *found, after_nothing = ours.loglikelihood(wanted)
    expected = theirs.loglikelihood(wanted[:-1])
    for request, got, right in zip(wanted, found, expected, strict=False):
        assert got[0] == pytest.approx(right[0], abs=1e-4, rel=1e-6), request.args
        assert got[1] == right[1], request.args
    assert {greedy for _, greedy in found} == {True, False}
    assert after_nothing[0] < 0, "theirs stops at a context that is all white space"


@pytest.mark.some(1)
@pytest.mark.parametrize("chunk", [1024, 100], ids=["one pass", "several passes"])
def test_texts_longer_than_the_window_are_read_as_transformers_does(
    both: tuple[PackLM, HFLM], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from floe_chat.app.cli.harness import harness_model

    ours, theirs = both
    monkeypatch.setattr(harness_model, "CHUNK", chunk)
    wanted = requests("loglikelihood_rolling", (LONG,), (TEXT,), ("",), (LONG[:512],))
    found, expected = ours.loglikelihood_rolling(wanted), theirs.loglikelihood_rolling(wanted)
    assert found == pytest.approx(expected, abs=1e-4, rel=1e-6)  # sums of up to 1480 terms


@pytest.mark.some(1)
def test_answers_are_those_of_transformers(both: tuple[PackLM, HFLM]) -> None:
    ours, theirs = both
    wanted = requests(
        "generate_until",
        (TEXT, {"until": ["e", "\n"], "max_gen_toks": 40}),
        (TEXT, {"until": [], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}),
        ("<s>Hi", {"until": ["</s>"], "max_new_tokens": 6}),
        (LONG, {"until": "no such text", "max_gen_toks": 6}),
    )
    found = ours.generate_until(wanted)
    assert found == theirs.generate_until(wanted) and any(found)


def test_conversations_are_written_as_transformers_does(both: tuple[PackLM, HFLM]) -> None:
    ours, theirs = both
    asked = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(asked) == theirs.apply_chat_template(asked)
    begun = [*asked, {"role": "assistant", "content": "I"}]
    assert ours.apply_chat_template(begun, False) == theirs.apply_chat_template(begun, False)
    with pytest.raises(UsageError, match="refuses"):
        ours.apply_chat_template([{"role": "critic", "content": "Hm"}])


def test_drawn_answers_repeat_with_the_run_and_differ_within_it(both: tuple[PackLM, HFLM]) -> None:
    wanted = requests("generate_until", *[(TEXT, {"until": [], "max_gen_toks": 8, "do_sample": True})] * 2)
    first = both[0].generate_until(wanted)
    assert first == both[0].generate_until(wanted) and first[0] != first[1]


def test_what_does_not_fit_the_window_is_refused(both: tuple[PackLM, HFLM]) -> None:
    ours, _ = both
    with pytest.raises(FloeError, match="likelihood of 513 tokens"):
        ours.loglikelihood(requests("loglikelihood", ("<s>", "x" * 513)))
    with pytest.raises(FloeError, match="likelihood of 0 tokens"):
        ours.loglikelihood(requests("loglikelihood", ("A", "")))
    with pytest.raises(FloeError, match="answers of 512 tokens"):
        ours.generate_until(requests("generate_until", ("A", {"until": [], "max_gen_toks": 512})))
    with pytest.raises(FloeError, match="num_beams"):
        ours.generate_until(requests("generate_until", ("A", {"until": [], "num_beams": 4})))
