"""Whether a model runs on a machine, how, and how fast; and how memory is shared out."""
