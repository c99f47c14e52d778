"""rewired: Llama checkpoints whose tensor-parallel all-reduces overlap with compute, shrink, or vanish.

`import rewired` makes transformers' Auto classes know `rewired_llama`. It does so when transformers is imported,
before or after us, and never imports it itself: `convert`, `info` and every `--help` start without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__version__ = "0.1.0"


def _register_config() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    from .configuration_rewired_llama import RewiredLlamaConfig

    AutoConfig.register(RewiredLlamaConfig.model_type, RewiredLlamaConfig, exist_ok=True)


def _register_models() -> None:
    from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM

    from .configuration_rewired_llama import RewiredLlamaConfig
    from .modeling_rewired_llama import RewiredLlamaForCausalLM, RewiredLlamaModel

    AutoModel.register(RewiredLlamaConfig, RewiredLlamaModel, exist_ok=True)
    AutoModelForCausalLM.register(RewiredLlamaConfig, RewiredLlamaForCausalLM, exist_ok=True)


_AFTER_IMPORT: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": _register_config,
    "transformers.models.auto.modeling_auto": _register_models,
}


class _RegisterAfterImport(MetaPathFinder):
    """Lets the import system find transformers' auto modules as ever, and registers our classes in them."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _AFTER_IMPORT:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run_module(module)
                _AFTER_IMPORT[fullname]()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _RegisterAfterImport())
for _name, _register in _AFTER_IMPORT.items():
    if _name in sys.modules:
        _register()
