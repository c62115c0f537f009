"""Comparison with llama.cpp."""
