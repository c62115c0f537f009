"""The modules that hold a model's weights."""
