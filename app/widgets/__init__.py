"""The parts of the chat screen. They only draw: what they show is handed to them."""
