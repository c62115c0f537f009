"""Mixers (kernels/mixers/) read from transformers' modules, and computed by torch's operations for many tokens, or on a
device without a compiled step: one file each.
"""
