"""The strategy classes for `lightning.pytorch`; importing this module registers their names there."""

from lightning_memsave.strategies.registration import strategy_classes

_CLASSES = strategy_classes("lightning.pytorch", __name__)
MemSaveStrategy = _CLASSES["MemSaveStrategy"]
MemSaveDDPStrategy = _CLASSES["MemSaveDDPStrategy"]
MemSaveFSDPStrategy = _CLASSES["MemSaveFSDPStrategy"]
