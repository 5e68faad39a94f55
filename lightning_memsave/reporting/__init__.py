"""Show a `MemoryReport` to people: loggers, the terminal, pictures. Besides the demo, only this room imports wandb."""
