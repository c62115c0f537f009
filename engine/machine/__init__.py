"""This machine: its hardware and its measured speeds."""
