"""The distance of a pack from its source, and the presets derived from it."""
