"""A model repository on the user's hub, and downloads from it."""
