"""The packed format: a pack's content and how to read it."""
