"""`python -m floe_chat.app`, as torchrun starts it."""

from .start import command

command()
