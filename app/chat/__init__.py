"""The conversation behind the chat screen: what is asked, answered, changed and saved, and which model answers."""
