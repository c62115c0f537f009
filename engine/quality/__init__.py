"""How far a pack is from its source, and the presets that follow."""
