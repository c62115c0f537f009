"""What fills the terminal: the chat, the help page, the notice for a terminal that is too small."""
