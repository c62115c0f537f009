"""A simulated card, in virtual time."""
