"""The terminal around the screen."""
