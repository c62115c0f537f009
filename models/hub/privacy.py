"""What may leave this machine: requests to the user's hub, when a model is requested, and chats with a server that the
user connects to (`app.client.remote.client`); nothing else.
"""

from __future__ import annotations

import os

_OFFLINE = "FLOE_CHAT_OFFLINE"


def stay_private() -> None:
    """Keep all libraries in this process and its children off the network permanently.

    Called before any of them is imported, since they read the environment only once. Our own requests to a hub
    (`models.hub`) or a server do not go through them, so that nothing else gets out while a model is being fetched;
    whether the user has forbidden those too is noted before the variable is ours.
    """
    os.environ.setdefault(_OFFLINE, os.environ.get("HF_HUB_OFFLINE", ""))
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_XET="1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")


def offline() -> bool:
    """Whether the user has set HF_HUB_OFFLINE (or FLOE_CHAT_OFFLINE), so that not even a hub may be contacted."""
    wish = os.environ.get(_OFFLINE, os.environ.get("HF_HUB_OFFLINE", ""))
    return wish.upper() in ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads it
