"""The main job: WideResNet-28-2 on real images, plain and with memory saving, in one table."""
