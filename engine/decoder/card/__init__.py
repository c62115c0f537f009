"""Tokens on a card: captured as CUDA graphs."""
