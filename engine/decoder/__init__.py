"""What computes the dense part of a pass: our own fused pass, or transformers' modules; and the KV cache."""
