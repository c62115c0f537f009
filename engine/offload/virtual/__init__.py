"""A card that is not there, in virtual time."""
