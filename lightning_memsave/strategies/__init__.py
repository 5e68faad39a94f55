"""Strategies: the mixin with its session, the three that are registered, and their names."""
