"""The dense part of a pass, by our own fused pass or transformers' modules, and the KV cache."""
