"""Memory and time, a script each: rows in `results/`."""
