"""From a `MemoryReport` to what people see: loggers, the terminal, pictures. The only room that imports wandb."""
