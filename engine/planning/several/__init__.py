"""One model on several cards of a machine."""
