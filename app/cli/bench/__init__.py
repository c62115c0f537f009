"""`floe-chat bench`."""
