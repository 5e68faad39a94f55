"""The strategy classes for `pytorch_lightning`; importing this module registers their names there."""

from lightning_memsave.strategies.registration import strategy_classes

_CLASSES = strategy_classes("pytorch_lightning", __name__)
MemSaveStrategy = _CLASSES["MemSaveStrategy"]
MemSaveDDPStrategy = _CLASSES["MemSaveDDPStrategy"]
MemSaveFSDPStrategy = _CLASSES["MemSaveFSDPStrategy"]
