"""The parts of the chat screen. They only draw what they are given."""
