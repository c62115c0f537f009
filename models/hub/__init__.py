"""A model repository on the hub that the user chose, and downloads from it."""
