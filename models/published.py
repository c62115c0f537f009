"""Published models that floe-chat can set up, of all families."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from typing import Any

from .catalog_entry import CatalogEntry, Counted, Sizes
from .families import FAMILIES

# Repositories with GGUF files of a model, its maker's own where there is one.
GGUF = {
    "granite-3.1-3b-a800m-instruct": "bartowski/granite-3.1-3b-a800m-instruct-GGUF",
    "olmoe-1b-7b-0125-instruct": "allenai/OLMoE-1B-7B-0125-Instruct-GGUF",
    "lfm2-8b-a1b": "LiquidAI/LFM2-8B-A1B-GGUF",
    "deepseek-v2-lite-chat": "mradermacher/DeepSeek-V2-Lite-Chat-GGUF",
    "deepseek-coder-v2-lite-instruct": "bartowski/DeepSeek-Coder-V2-Lite-Instruct-GGUF",
    "ernie-4.5-21b-a3b": "unsloth/ERNIE-4.5-21B-A3B-PT-GGUF",
    "ernie-4.5-21b-a3b-thinking": "unsloth/ERNIE-4.5-21B-A3B-Thinking-GGUF",
    "gemma-4-26b-a4b-it": "unsloth/gemma-4-26B-A4B-it-GGUF",
    "glm-4.7-flash": "unsloth/GLM-4.7-Flash-GGUF",
    "qwen3-30b-a3b-instruct-2507": "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF",
    "qwen3-30b-a3b-thinking-2507": "unsloth/Qwen3-30B-A3B-Thinking-2507-GGUF",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B-GGUF",
    "qwen3-coder-30b-a3b-instruct": "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF",
    "qwen3.6-35b-a3b": "unsloth/Qwen3.6-35B-A3B-GGUF",
    "qwen3.5-35b-a3b": "unsloth/Qwen3.5-35B-A3B-GGUF",
    "phi-3.5-moe-instruct": "bartowski/Phi-3.5-MoE-instruct-GGUF",
    "mixtral-8x7b-instruct": "TheBloke/Mixtral-8x7B-Instruct-v0.1-GGUF",
    "mixtral-8x7b": "TheBloke/Mixtral-8x7B-v0.1-GGUF",
    "qwen2-57b-a14b-instruct": "Qwen/Qwen2-57B-A14B-Instruct-GGUF",
    "glm-4.5-air": "unsloth/GLM-4.5-Air-GGUF",
    "mixtral-8x22b-instruct": "bartowski/Mixtral-8x22B-Instruct-v0.1-GGUF",
    "granite-4.0-h-tiny": "bartowski/ibm-granite_granite-4.0-h-tiny-GGUF",
    "granite-4.0-h-small": "bartowski/ibm-granite_granite-4.0-h-small-GGUF",
    "nemotron-3-nano-30b-a3b": "unsloth/Nemotron-3-Nano-30B-A3B-GGUF",
    "trinity-mini": "arcee-ai/Trinity-Mini-GGUF",
    "hunyuan-a13b-instruct": "tencent/Hunyuan-A13B-Instruct-GGUF",
}

LISTED = "listed.json"  # asset: models of families without a record, with sizes that a test counts and compares


def _without_record() -> Iterator[CatalogEntry]:
    """Models of families that have none: to count their sizes would need transformers, so these are stored."""
    stored: dict[str, Any] = json.loads(files("floe_chat.assets").joinpath(LISTED).read_text(encoding="utf-8"))
    for name, fields in stored.items():
        counted: dict[str, Any] = fields["sizes"]["counted"]
        linears = (shape for rows, columns, times in counted["linears"] for shape in times * ((rows, columns),))
        counted["linears"] = tuple(linears)
        counted["tables"] = tuple(tuple(table) for table in counted.get("tables", ()))
        fields["sizes"]["counted"] = Counted(**counted)
        fields["sizes"] = Sizes(**fields["sizes"])
        yield CatalogEntry(name, **fields)


_WITH_RECORD = (entry for family in FAMILIES.values() for entry in family.published)
_ALL = [replace(entry, gguf=GGUF.get(entry.name, "")) for entry in (*_WITH_RECORD, *_without_record())]
_ALL.sort(key=lambda entry: entry.released, reverse=True)
PUBLISHED = tuple(
    sorted(
        _ALL,
        key=lambda entry: (entry.chat is None, entry.sizes.parameters, bool(entry.made_for), entry.thinks),
    )
)
"""In the order in which they are listed if no machine is known (`engine.planning.plan.ranked` knows one): the smallest
that can chat first, base models last; of one size the newest that is made for everything and answers at once.
"""
