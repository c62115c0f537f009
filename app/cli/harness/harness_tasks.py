"""Tasks of lm-evaluation-harness: finding them, loading their data, and limiting what they may do.

A task is a YAML file, often with Python beside it, and data from the Hugging Face Hub. Nothing is fetched unless the
person allowed it, and code that only the Hub has is never run: data sets are files, and tasks whose metrics are
programs on the Hub are refused.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import logging
import os
import random
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....models.errors import FloeError, UsageError
from ...log import log_file

if TYPE_CHECKING:
    from .harness_model import PackLM


SCRIPTLESS = 4  # the first version of the package datasets for which a data set is files only


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one task, or group of tasks, under one preset. A group has no number of samples of its own."""

    task: str
    metric: str
    filter: str
    preset: str
    value: float
    stderr: float | None
    higher_is_better: bool | None
    samples: int | None
    fewshot: int | None


def prepare(*, download: bool) -> str:
    """Import the harness with the network as allowed; returns its version. Nothing may have imported its parts before.

    Raises:
        FloeError: it is not installed, or one of its parts is too old.
    """
    # Read when huggingface_hub, datasets and evaluate are imported: metrics that are programs on the Hub stay there,
    # and nobody counts what is loaded here.
    os.environ.update(HF_HUB_OFFLINE=str(int(not download)), HF_EVALUATE_OFFLINE="1", HF_UPDATE_DOWNLOAD_COUNTS="0")
    try:
        with _silence():
            importlib.import_module("lm_eval.evaluator")
    except ImportError as error:
        raise FloeError(
            "lm-evaluation-harness cannot be used here",
            f"{error}.",
            "Install it: pip install 'floe-chat[harness]', or pip install lm-eval",
        ) from error
    if int(version("datasets").partition(".")[0]) < SCRIPTLESS:
        raise FloeError(
            f"The package datasets {version('datasets')} is too old",
            "It would run code that comes with a data set.",
            f"Update it: pip install 'datasets>={SCRIPTLESS}'",
        )
    for handler in logging.getLogger("floe_chat").handlers:
        logging.getLogger("lm_eval").addHandler(handler)
    return version("lm_eval")


def load(names: Sequence[str], folder: Path | None, fewshot: int | None, *, download: bool) -> dict[str, Any]:
    """The tasks that `names` mean, with their data, as the harness's `evaluate` takes them.

    Args:
        names: of tasks, groups or tags; * and ? stand for any letters. folder: searched before the harness's own
            tasks; data files are looked for from there. fewshot: how many solved examples precede each question; None
            for what each task says, and tasks that say 0 keep that.

    Raises:
        UsageError: a name that means nothing, or a task that runs programs of the model's or the Hub's.
        FloeError: data that cannot be had.
    """
    manager, wanted = _find(names, folder)
    with _border("The tasks cannot be loaded", download=download), contextlib.chdir(folder or "."):
        tasks: dict[str, Any] = manager.load(wanted)
    for name, task in tasks["tasks"].items():
        _refuse_programs(name, task)
        says: int | None = task.get_config("num_fewshot")
        if says is None or (fewshot is not None and says != 0):
            task.set_config(key="num_fewshot", value=fewshot or 0)
    return tasks


def _refuse_programs(name: str, task: Any) -> None:
    metrics: dict[str, Any] = getattr(task, "_metric_fn_list", {})
    # A task that scores answers by itself only names its metrics.
    own = task.get_config("process_results") is not None
    lacking = [] if own else [metric for metric, function in metrics.items() if function is None]
    if lacking or getattr(task, "UNSAFE_CODE", False):
        program = f"{lacking[0]}, code that the hub supplies" if lacking else "code that the model writes"
        raise UsageError(f"The task {name} runs {program}", "floe-chat does not run such code.", "Choose another task.")


def measure(lm: PackLM, tasks: dict[str, Any], limit: int | None, *, chat: bool, download: bool) -> list[Score]:
    """Every figure of the tasks, for the model as it is set now.

    Raises:
        FloeError: a task that cannot be computed.
    """
    import numpy as np
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from lm_eval.evaluator import evaluate

    # As the harness's own command does it, and again for each preset, so that all see the same examples.
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    with _border("A task failed", download=download):
        found: Any = evaluate(
            lm, tasks, limit=limit, log_samples=False, apply_chat_template=chat, fewshot_as_multiturn=chat
        )
    return [figure for name in found["results"] for figure in _figures(name, lm.preset, found)]


def _figures(task: str, preset: str, found: dict[str, Any]) -> Iterator[Score]:
    fields: dict[str, Any] = found["results"][task]
    for key, value in fields.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = fields.get(f"{metric}_stderr,{chosen}")
        yield Score(
            task=task,
            metric=metric,
            filter=chosen,
            preset=preset,
            value=float(value),
            stderr=float(stderr) if isinstance(stderr, int | float) else None,
            higher_is_better=found["higher_is_better"].get(task, {}).get(metric),
            samples=found["n-samples"].get(task, {}).get("effective"),
            fewshot=found["n-shot"].get(task),
        )


def _find(names: Sequence[str], folder: Path | None) -> tuple[Any, list[str]]:
    """A task manager that knows all of `names`, and what they match."""
    if folder is not None and not folder.is_dir():
        raise UsageError(f"There is no folder {folder}", "", "Give the folder that holds the tasks' YAML files.")
    # A group in the folder may be made of the harness's own tasks.
    manager = None if folder is None else _manager(folder, own_only=True)
    if manager is None or manager.all_groups or not all(manager.match_tasks([name]) for name in names):
        manager = _manager(folder, own_only=False)
    matches = {name: manager.match_tasks([name]) for name in names}
    missing = [name for name, found in matches.items() if not found]
    if missing:
        near = [match for name in missing for match in difflib.get_close_matches(name, manager.all_tasks, n=5)]
        there = [] if folder is None else _manager(folder, own_only=True).all_tasks
        raise UsageError(
            f"There is no task {', '.join(missing)}",
            "" if folder is None else f"{folder} has {', '.join(there) or 'none that can be read'}.",
            f"Did you mean {' or '.join(near)}?" if near else "See the list: lm-eval ls tasks",
        )
    return manager, list(dict.fromkeys(match for found in matches.values() for match in found))


@cache
def _manager(folder: Path | None, *, own_only: bool) -> Any:
    """Knows the tasks in `folder`, and unless `own_only` the harness's own: some 14,000 files, read in ten seconds."""
    from lm_eval.tasks import TaskManager

    with _silence():
        return TaskManager(include_path=folder and folder.resolve(), include_defaults=not own_only)


@contextlib.contextmanager
def _border(title: str, *, download: bool) -> Generator[None]:
    """Runs the harness and its tasks: silenced, without network unless allowed, every failure explained."""
    try:
        with _silence(), contextlib.nullcontext() if download else _no_network():
            yield
    except FloeError:
        raise
    # A task is untrusted code.
    except Exception as error:
        logging.getLogger("floe_chat").exception("%s", title)
        hint = f"The details are in {log_file()}."
        if isinstance(error, ConnectionError) or (not download and _network().asked):
            hint = "Check the connection." if download else "Add --download to download what is missing."
        raise FloeError(title, _first_line(error), hint) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class _Nowhere(io.TextIOBase):
    """Takes what is written and forgets it; never closed, since libraries keep the stream they started with."""

    def write(self, s: str, /) -> int:
        return len(s)


@contextlib.contextmanager
def _silence() -> Generator[None]:
    """The harness and its libraries print progress, advice and warnings; stdout and stderr are for ours."""
    with contextlib.redirect_stdout(_Nowhere()), contextlib.redirect_stderr(_Nowhere()):
        yield


class _Network:
    """The interpreter asks here before it connects. Such a hook cannot be taken back, so it has a switch.

    Attributes:
        refused: nothing may connect. asked: something wanted to since this was last set.
    """

    def __init__(self) -> None:
        self.refused = self.asked = False
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        # A socket's address is a tuple on the network, and a path on this machine.
        if self.refused and (
            event == "socket.getaddrinfo" or (event == "socket.connect" and isinstance(arguments[1], tuple))
        ):
            self.asked = True
            raise ConnectionError("It needs the network")


_network = cache(_Network)


@contextlib.contextmanager
def _no_network() -> Generator[None]:
    """The Hub's library is set to stay offline, but a task's own Python may use other ways to fetch data."""
    network = _network()
    network.refused, network.asked = True, False
    try:
        yield
    finally:
        network.refused = False
