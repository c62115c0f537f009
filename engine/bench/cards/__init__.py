"""The engine on virtual cards, beside other policies."""
