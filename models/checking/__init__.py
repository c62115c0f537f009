"""Checking a pack, and packing its damaged files again."""
