"""Text and figures for a terminal."""
