"""The packed format: what a pack holds and how it is read."""
