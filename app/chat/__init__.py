"""The conversation behind the chat screen: questions, answers, changes, saving, and which model answers."""
