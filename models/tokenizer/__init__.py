"""Tokenizer and chat template, in a process of their own."""
