"""One MoE layer under a rule: in RAM, offloaded, and in prompts."""
