"""Writing a pack from a checkpoint."""
