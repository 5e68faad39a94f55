"""Models that are measured and trained, and data made from seeds."""
