"""A model that answers on a server, behind the interface of the engine."""
