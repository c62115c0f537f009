"""Tokenizer and chat template, in their own process."""
