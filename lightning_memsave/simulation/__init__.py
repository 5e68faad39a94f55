"""A step without memory: fake tensors, what is known of their values, and the CUDA allocator replayed."""
