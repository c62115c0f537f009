"""The built-in demo model: a small Mixtral trained from scratch on texts about floe-chat.

`python -m floe_chat.assets.demo.make OUT_DIR` reads the authored texts under assets/demo and writes a checkpoint in the
published form. Nothing here is needed to chat; it is how the shipped demo model was made, and can be repeated.
"""

from pathlib import Path

_SOURCE = Path(__file__).parents[1] / "checkpoint"


def source() -> Path:
    """The demo's 16-bit checkpoint, which its pack was made from and git does not keep.

    Raises:
        SystemExit: it is not there; says how to get it.
    """
    if not (_SOURCE / "config.json").is_file():
        raise SystemExit(
            f"The demo's 16-bit source is not there, in {_SOURCE}. Run `make demo`: in two hours, it trains and packs "
            "the demo again. Or restore the source of the present pack as CONTRIBUTING.md says."
        )
    return _SOURCE
