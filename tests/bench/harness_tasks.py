"""Writes tasks for `floe-chat harness` about our own manual, which need no network: a YAML and a JSONL file each.

Run: .venv/bin/python tests/bench/harness_tasks.py OUT, then
floe-chat harness demo --tasks 'floe_manual_*' --tasks-folder OUT --chat -p High -p Balanced -p Fast -p "No sparsity"

- floe_manual_choice: held-out questions, each with four answers from the manual's question catalogue to choose from.
- floe_manual_answer: the same held-out questions answered freely; right if every key fact is in the answer.
- floe_manual_text: perplexity of the manual itself.

With --hf CHECKPOINT the harness's own class for transformers models answers them, in float32, for comparison.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from floe_chat.assets.demo.make.check import ANSWER_TOKENS, missing_facts
from floe_chat.assets.demo.make.facts import Fact, FactCheck, read_facts, read_heldout
from floe_chat.models.catalog import asset

CHOICES = 4
# A held-out question does not say which record answers it: that of the most alike question does, if it is as alike as
# this, and so many times more alike than the runner-up's. Read through by hand: no wrong answer is among them.
ALIKE, AHEAD = 0.4, 2.5
SCORE = '''"""Scores a free answer: 1 if every key fact is in it."""


def score(doc, results):
    text = results[0].lower()
    return {"acc": float(all(any(part in text for part in fact.lower().split("|")) for fact in doc["expect"]))}
'''


def words(text: str) -> set[str]:
    """The words of a text, without case."""
    return set(re.findall(r"[a-z0-9+-]+", text.lower()))


def ways_to_ask(fact: Fact) -> list[str]:
    """Phrases and questions of a record."""
    return [phrase for phrases in fact.forms.values() for phrase in phrases]


def choice_questions(facts: Sequence[Fact], checks: Sequence[FactCheck]) -> list[dict[str, Any]]:
    """{"question", "choices", "answer"}: the right answer, and those of the most alike other questions."""
    common = Counter(word for fact in facts for word in words(" ".join(ways_to_ask(fact))))

    def weight(some: set[str]) -> float:
        return sum(1 / (1 + common[word]) for word in some)

    def alike(question: str, fact: Fact) -> float:
        asked = words(question)
        return max(
            weight(asked & words(way)) / weight(asked | words(way)) ** 0.5 for way in ways_to_ask(fact) if words(way)
        )

    found: list[dict[str, Any]] = []
    for check in checks:
        question = check.get("question", "")
        possible = [fact for fact in facts if not missing_facts(check, fact.answer)]
        ranked = sorted(((alike(question, fact), fact.name, fact) for fact in possible), reverse=True)
        (best, _, right), *others = ranked or [(0.0, "", facts[0])]
        if best < ALIKE or (others and best < AHEAD * others[0][0]):
            continue
        wrong = [fact for fact in facts if missing_facts(check, fact.answer)]
        choices = [right, *sorted(wrong, key=lambda fact: alike(question, fact), reverse=True)[: CHOICES - 1]]
        random.Random(question).shuffle(choices)
        # The chat template ends with [/INST]; what follows starts with a space.
        texts = [" " + fact.answer.split("\n\n")[0] for fact in choices]
        found.append({"question": question, "choices": texts, "answer": choices.index(right)})
    return found


def write(folder: Path) -> None:
    """Three tasks."""
    checks = [check for check in read_heldout() if not check.get("history")]
    asked: dict[str, Any] = {"doc_to_text": "{{question}}", "num_fewshot": 0}
    exact = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    _task(
        folder,
        "choice",
        choice_questions(read_facts(), checks),
        {
            **asked,
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": exact,
        },
    )
    _task(
        folder,
        "answer",
        [dict(check) for check in checks],
        {
            **asked,
            "output_type": "generate_until",
            "doc_to_target": "{{expect}}",
            "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": ANSWER_TOKENS},
            "process_results": "FUNCTION",
            "metric_list": exact[:1],
        },
    )
    (folder / "scoring.py").write_text(SCORE, encoding="utf-8")
    _task(
        folder,
        "text",
        [{"text": asset("demo", "manual.md").read_text(encoding="utf-8")}],
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        },
    )


def _task(folder: Path, name: str, docs: Sequence[Mapping[str, Any]], fields: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(doc, ensure_ascii=False) for doc in docs]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    task = {
        "task": f"floe_manual_{name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        "metadata": {"version": 1},
        **fields,
    }
    text = yaml.safe_dump(task, sort_keys=False, allow_unicode=True).replace("FUNCTION", "!function scoring.score")
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    print(f"floe_manual_{name}: {len(docs)}")


def main() -> None:
    """Write the tasks, or run them through transformers; the last line is one JSON object then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT")
    parser.add_argument("--hf", type=Path, metavar="CHECKPOINT")
    options = parser.parse_args()
    write(options.folder)
    if options.hf is not None:
        print(json.dumps(by_transformers(options.hf.resolve(), options.folder)))


def by_transformers(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """The figures of the harness's own `hf` model, computing in float32, by task."""
    import contextlib

    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    arguments: dict[str, str | int | float] = {"pretrained": str(checkpoint), "dtype": "float32"}
    with contextlib.chdir(folder):
        found = simple_evaluate(
            "hf",
            model_args=arguments,
            tasks=["floe_manual_choice", "floe_manual_answer", "floe_manual_text"],
            task_manager=TaskManager(include_path=".", include_defaults=False),
            device="cpu",
            apply_chat_template=True,
            log_samples=False,
        )
    assert found is not None
    return dict(found.get("results", {}))


if __name__ == "__main__":
    main()
