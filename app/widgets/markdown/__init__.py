"""Answers' Markdown, as it grows."""
