"""Private names of torch, and what is built on them: the autograd graph, fake tensors, optimizers that change class."""
