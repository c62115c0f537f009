"""`floe-chat harness`."""
