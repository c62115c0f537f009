"""`floe-chat eval` and `floe-chat tune`: what packing and presets cost."""
