"""Turns token ids into token ids; knows no screen and no tokenizer. Imports models and kernels."""
