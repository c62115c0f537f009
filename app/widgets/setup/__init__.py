"""The wizard's steps."""
