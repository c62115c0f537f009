"""What decides about rows that are in RAM, defined in plain Python; compiled versions are in cpu/."""
