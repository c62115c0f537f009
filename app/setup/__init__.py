"""Setting up a model: the request, and the steps from download to check."""
