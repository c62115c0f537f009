"""From a new machine to the first chat."""
