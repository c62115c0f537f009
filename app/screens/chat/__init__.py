"""The chat's page."""
