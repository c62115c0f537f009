"""The built-in demo model: a small Mixtral trained from scratch on texts about floe-chat.

`python -m floe_chat.assets.demo.make OUT_DIR` reads the authored texts under assets/demo and writes a checkpoint in the
published form. Nothing here is needed to chat; it is how the shipped demo model was made, and can be repeated.
"""
