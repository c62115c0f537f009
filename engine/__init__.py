"""The engine: token ids in, token ids out, without screen or tokenizer. Imports models and kernels."""
