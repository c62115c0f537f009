"""The engine as the screen and commands use it."""
