"""The chat line by line, without a screen."""
