"""What the person wants of a model's thinking: folded, shown, or none, where the model can do without."""

from __future__ import annotations

from ..client.interface import Client
from ..client.thinking import THINKING_CHOSEN, limit_of_off, need_mode
from .view import View


class Thinking:
    """Applies the choice to the model and to the messages on the screen."""

    def __init__(self, client: Client, view: View) -> None:
        self._client = client
        self._view = view
        self._mode = "fold"

    def take(self, mode: str) -> None:
        """Do as the settings say."""
        if mode != self._mode:
            self._mode = mode
            self._client.think = mode != "off"
            self._view.messages.show_thinking(opened=mode == "show")

    def choose(self, mode: str) -> bool:
        """Do as the person says, or open the last answer's thinking without a `mode`; returns whether to save it.

        Raises:
            UsageError: there is no such mode.
        """
        if not mode:
            if not self._view.messages.turn_thinking():
                self._view.gauges.remark("No answer here has thinking to show")
            return False
        need_mode(mode)
        self.take(mode)
        limit = limit_of_off(self._client.thinking) if mode == "off" else ""
        self._view.gauges.remark(limit or THINKING_CHOSEN[mode])
        return True

    def tell(self) -> None:
        """A model was loaded: say if it cannot do as the person wants."""
        if self._mode == "off" and (limit := limit_of_off(self._client.thinking)):
            self._view.gauges.remark(limit)
