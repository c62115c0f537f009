"""The engine, as the screen and the commands use it."""
