"""The help page: every key, and what the panel's words mean."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

KEYS = (
    ("Enter", "send; while the model loads, the question waits and goes out by itself"),
    ("Ctrl+J", "new line (Shift+Enter too where the terminal reports it)"),
    ("Up", "in an empty field: bring the last question back"),
    ("Esc", "stop the answer, or take a waiting question back; what was written stays"),
    ("Ctrl+N", "new chat"),
    ("PageUp, PageDown", "scroll the chat"),
    ("F1", "this page"),
    ("F2", "show or hide the panel"),
    ("Tab", "to the panel and back; there Up and Down scroll it"),
    ("F3", "next quality preset, also while an answer is written"),
    ("Ctrl+P", "all commands and the colour themes"),
    ("Ctrl+Q", "quit"),
)

TERMS = (
    ("decode", "tokens the model writes per second: in the last second, and over the whole answer"),
    ("prefill", "tokens of your question and the chat before it that are read per second"),
    ("time to first token", "from Enter to the first piece of the answer"),
    ("expert", "one of several small networks in each layer; the model picks a few for every token"),
    ("neuron", "one unit of an expert; the inactive ones are skipped, which is what makes this fast"),
    ("active share", "neurons of the picked experts that took part, over all layers and by layer"),
    ("bytes read per token", "weights that the picked experts had to read to write one token"),
    ("Experts", "the share of calls that went to each expert: layers to the right, experts downwards"),
    ("KV cache", "what the model keeps of the chat so far; context is how much of its window that fills"),
    ("model, resident part", "the part of the model that is always in the device's memory"),
    ("preset", "how many neurons may be skipped: slower and closer to the full model, or faster"),
    ("Backend", "where the model computes, with which kernels, and why those"),
    ("tokens kept", "the part of the prompt that the KV cache held from the turn before: no time went into it"),
    ("Rows", "a neuron's weights. Shown when GPU memory holds a part of the rows only; the rest is in RAM"),
    ("hit rate, ready", "active neurons whose rows were in GPU memory when they were wanted"),
    ("coming", "rows that had been asked for before they were wanted, and were on their way"),
    ("copied", "rows that came from RAM when they were wanted"),
    ("on CPU", "neurons that the CPU computed where their rows lie, so that nothing had to move"),
    ("left out", "active neurons without rows in time, which a lenient preset skipped"),
    ("expert hit rate", "calls of an expert for which no row had to be asked for"),
    ("predictor recall", "of the neurons that became active, those that were named one layer ahead"),
    ("its precision", "of the neurons that were named, those that became active"),
    ("substituted, dropped", "experts for which others in GPU memory stood in; expert halves skipped, of low score"),
    ("Link", "between RAM and GPU: what it moved for one token, how fast, and how long the GPU waited for that"),
    ("dense, up, pool", "GPU memory for the layers around the experts, for what finds active neurons, and for rows"),
    ("virtual time", "times are counted for a card that is not in this machine: they say nothing about this one"),
    ("—", "not measured yet. kB, MB and GB are powers of 1000"),
)


class HelpScreen(ModalScreen[None]):
    """Lies over the chat, which goes on under it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q", "dismiss", "Close", show=False),
        Binding("up,k", "scroll(-1)", show=False),
        Binding("down,j", "scroll(1)", show=False),
        Binding("pageup", "scroll(-10)", show=False),
        Binding("pagedown,space", "scroll(10)", show=False),
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help") as page:
            page.can_focus = False
            page.border_title = "floe-chat"
            page.border_subtitle = "Esc closes"
            yield Static("Keys", classes="help-heading")
            yield from (_entry(name, text) for name, text in KEYS)
            yield Static("The panel's words", classes="help-heading")
            yield from (_entry(name, text) for name, text in TERMS)

    def action_scroll(self, lines: int) -> None:
        """Move the page by some lines."""
        self.query_one("#help").scroll_relative(y=lines, animate=False)


def _entry(name: str, text: str) -> Horizontal:
    return Horizontal(
        Static(name, classes="name", markup=False),
        Static(text, classes="meaning", markup=False),
        classes="help-entry",
    )
