"""transformers' AutoTokenizer and the configuration classes that it needs, without importing torch.

transformers' configuration classes import torch to name types, which takes longer than the rest of `pipeline validate`,
and a job's processes without an engine do not need it. While transformers is imported, torch is a stand-in that becomes
the real module when one of its names is first used. Afterwards `import torch` imports the real module everywhere.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _TorchWhenUsed(ModuleType):
    def __getattr__(self, name: str) -> Any:
        _forget(self)
        return getattr(importlib.import_module("torch"), name)


def _forget(stand_in: ModuleType) -> None:
    if sys.modules.get("torch") is stand_in:
        del sys.modules["torch"]


_stand_in = _TorchWhenUsed("torch")
_stand_in.__spec__ = importlib.util.find_spec("torch")  # transformers checks whether torch is installed
sys.modules.setdefault("torch", _stand_in)
try:
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig
finally:
    _forget(_stand_in)

__all__ = ["CONFIG_MAPPING", "AutoTokenizer", "PreTrainedConfig"]
