"""Mixers: what lets a layer's tokens see each other, between the layer's first projection and the one back.

Each is one file: its weights, what it stores of a text, and its plain definition for one token. Its other
implementations are named after it: cpu/src/dense/, triton/, and the engine's for many tokens (engine/decoder/mixers/).
"""
