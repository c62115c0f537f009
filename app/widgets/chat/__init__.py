"""Messages, and the text field."""
