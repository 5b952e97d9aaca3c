"""transformers' AutoTokenizer and what it needs of configurations, without an import of torch.

Its configuration classes import torch to name types, which takes longer than all the rest of `pipeline validate`, and
the processes of a job that have no engine need none. So while transformers is imported, torch is a stand-in that
becomes the real one at the first use of a name of it. Afterwards `import torch` gives the real one anywhere.
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
_stand_in.__spec__ = importlib.util.find_spec("torch")  # transformers asks whether torch is installed
sys.modules.setdefault("torch", _stand_in)
try:
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig
finally:
    _forget(_stand_in)

__all__ = ["CONFIG_MAPPING", "AutoTokenizer", "PreTrainedConfig"]
