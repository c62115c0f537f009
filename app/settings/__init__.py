"""The settings: their table, their file, their check."""
