"""What a person sees: command line, Textual screens, settings. Imports engine and models."""
