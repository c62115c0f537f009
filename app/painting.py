"""What Textual does more than it has to: each layout and each repaint is time that the engine and the keys wait for."""

from __future__ import annotations

from collections.abc import Iterable

from textual._compositor import Compositor
from textual.geometry import Region, Size
from textual.reactive import Reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, TextArea


def lighten() -> None:
    """Let Textual do less of it, for all applications of this process."""
    # It lays the whole screen out a second time after each change of any size, in case scrollbars come or go. Those ask
    # for a layout themselves, and each takes some 10 ms. But where a widget says itself how large its content is, a
    # text field for one, that is how it grows and shrinks.
    vars(Widget)["virtual_size"]._layout = False
    own = Reactive(Size(0, 0), layout=True)
    own.__set_name__(ScrollView, "virtual_size")
    ScrollView.virtual_size = own  # pyright: ignore[reportAttributeAccessIssue]
    Compositor._get_renders = _touched  # pyright: ignore[reportPrivateUsage]
    for field in (Input, TextArea):  # each blink is painted: 1 % of a core while nothing else happens
        vars(field)["cursor_blink"]._default = False


def _touched(self: Compositor, crop: Region | None = None) -> Iterable[tuple[Region, Region, list[Strip]]]:
    """Where widgets are, where they are cut off, and their lines, of those alone that `crop` touches.

    Textual's own takes the lines of all that could be painted there, had they another place: all on the screen.
    """
    for widget, (region, clip) in self.visible_widgets.items():
        shown = region.intersection(clip)
        if shown and (crop is None or crop.overlaps(shown)):
            yield region, clip, widget.render_lines(shown.translate(-region.offset))
