"""The model card of a pack: the README.md by which a hub shows what it is. Every figure is one that the pack holds."""

from __future__ import annotations

import json
import re
from importlib.metadata import version

from ..catalog import published
from ..pack.manifest import DRAFT, SOURCE, Manifest, TunedPreset
from ..quantities import size, trimmed
from ..visible import as_name

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_LICENCES = {"Apache-2.0": "apache-2.0", "MIT": "mit"}  # by the hub's own names
_HUB = "https://huggingface.co"
# Setup of earlier versions refuses a file that it does not know.
_DRAFT = f"guesses further tokens; update floe-chat if it says that `{DRAFT}` is not a file of a pack"


def card(manifest: Manifest, name: str) -> str:
    """README.md with the front matter that a hub reads. `name`: what the model is called here."""
    called = _plain(name)
    return "\n".join([*_front_matter(manifest), "", f"# {called}", "", *_about(manifest), "", *_presets(manifest), ""])


def _front_matter(manifest: Manifest) -> list[str]:
    entry = published(manifest.source.name)
    licence = entry.licence if entry else ""
    known = _LICENCES.get(licence)
    lines = ["---", f"license: {known or 'other'}" + ("" if known else "  # fill in: that of the base model")]
    lines += [f"license_name: {json.dumps(licence)}"] if licence and not known else []
    if (base := _base(manifest)) is None:
        lines += [f"# base_model: owner/name, fill in: it was packed from {json.dumps(_plain(manifest.source.name))}"]
    else:
        lines += [f"base_model: {base}", "base_model_relation: quantized"]
    lines += ["library_name: floe-chat", "pipeline_tag: text-generation"]
    return [*lines, "tags:", "- floe-chat", "- mixture-of-experts", f"- {manifest.architecture.model_type}", "---"]


def _about(manifest: Manifest) -> list[str]:
    a, base, commit = manifest.architecture, _base(manifest), manifest.source.commit
    source = f"[{base}]({_HUB}/{base})" if base else _plain(manifest.source.name)
    at = f" at commit `{_plain(commit)}`" if commit else ""
    files = {**manifest.files, **manifest.beside}
    text = f"{manifest.calibration.tokens:,} tokens" + (
        "" if manifest.calibration.weighed else ", by values without the router's weight"
    )
    return [
        f"A pack of {source}{at} for floe-chat, which chats with Mixture-of-Experts models larger than a GPU. It needs "
        "no packing:",
        "",
        "```sh",
        "floe-chat setup OWNER/NAME  # fill in: this repository",
        "```",
        "",
        "| | |",
        "|---|---|",
        f"| size | {size(sum(entry.size for entry in files.values()))} in {len(files) + 1} files |",
        f"| bits per weight | {manifest.describe()} |",
        f"| model | {manifest.family.called}: {a.layers} layers with {a.experts} experts, {a.top_k} for each token |",
        f"| calibration | {text} |",
        *([f"| drafting head | {_DRAFT} |"] if DRAFT in manifest.beside else []),
        f"| format | version {manifest.version}; this card by floe-chat {version('floe-chat')} |",
        "",
        "`manifest.json` has the size and sha256 of every file; floe-chat compares them all.",
    ]


def _presets(manifest: Manifest) -> list[str]:
    if not manifest.tuned:
        return ["Its presets are the usual ones: they were not measured on this model (`floe-chat tune` does)."]
    heads = ["| preset | KL, nats | from | experts' bytes read per token | measured on |", "|---|---|---|---|---|"]
    return ["Presets, as measured on this pack:", "", *heads, *map(_preset, manifest.tuned)]


def _preset(one: TunedPreset) -> str:
    against = "the 16-bit original" if one.against == SOURCE else "the pack with nothing left out"
    text = f"{_plain(one.text)}, {one.tokens:,} tokens" if one.text else "not noted"
    return f"| {_plain(one.name)} | {trimmed(one.kl, 2)} | {against} | {size(one.bytes_per_token)} | {text} |"


def _base(manifest: Manifest) -> str | None:
    """The hub id of the source; None where that is not known."""
    source = manifest.source
    if (entry := published(source.name)) is not None:
        return entry.repo
    return source.name if source.commit and _HUB_ID.fullmatch(source.name) else None


def _plain(text: str) -> str:
    """Text from a manifest in one line, without what Markdown or HTML would make something of."""
    return re.sub(r"[`|<>\[\]\\*_#]", " ", as_name(text))
