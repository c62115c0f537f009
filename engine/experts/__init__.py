"""One MoE layer: what its rule leaves, in RAM, offloaded, and in prompts."""
