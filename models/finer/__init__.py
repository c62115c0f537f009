"""Checkpoints of finer experts, made of published ones: the complete transformation of DualSparse-MoE, section 3.1."""
