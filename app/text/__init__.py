"""Text and figures made fit for a terminal."""
