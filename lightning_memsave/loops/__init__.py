"""What runs in a training step: microbatches, out-of-memory recovery, and merging of what parts of a batch return."""
