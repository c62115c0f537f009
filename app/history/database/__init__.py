"""The history's SQLite file."""
