"""llama.cpp beside the engine."""
