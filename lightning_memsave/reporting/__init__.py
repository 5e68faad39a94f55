"""Show a `MemoryReport` to people: loggers, the terminal, pictures. The only room that imports wandb."""
