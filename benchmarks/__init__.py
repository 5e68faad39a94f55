"""Benchmarks of lightning-memsave; README.md beside this file says what to run."""
