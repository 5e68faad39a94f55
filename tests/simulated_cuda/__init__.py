"""A CUDA device without one: torch's own CUDA code runs, its allocator, streams, threads and limits, on host memory.

`runtime.cpp` is the CUDA runtime, `kernels.cpp` computes what kernels would. What runs on it shows where tensors lie,
what is allocated, what a full device raises and what an engine's thread sees; nothing about time, and nothing about
kernels: cuBLAS's and cuDNN's workspaces do not exist, Triton's kernels and compiled code cannot run.

    python -m tests.simulated_cuda [pytest's arguments]

runs the tests that need a CUDA device on it.
"""
