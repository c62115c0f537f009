"""Messages, and the field where the person writes."""
