"""Vocabulary shared by every room: units, errors, reports, the compatibility table."""
