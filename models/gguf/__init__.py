"""Models in GGUF files, read as the checkpoints that they were converted from."""
