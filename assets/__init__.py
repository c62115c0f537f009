"""Data files only: the demo model and the calibration text."""
