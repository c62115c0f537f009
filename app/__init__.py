"""The user interface: command line, Textual screens, settings. Imports engine and models."""
