"""The peak of a step before it runs: a dry run on fake tensors or a few real steps, and plans within a budget."""
