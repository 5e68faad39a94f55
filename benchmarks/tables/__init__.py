"""The tables of README and docs, written from the rows."""
