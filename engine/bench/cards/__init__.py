"""The engine on virtual cards, compared with other policies."""
