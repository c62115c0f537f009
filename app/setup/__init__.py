"""Setting up a model: what is wanted, and its way from download to check."""
