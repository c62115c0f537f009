"""The way from a bare machine to the first chat."""
