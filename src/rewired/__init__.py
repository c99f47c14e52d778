"""rewired: checkpoints whose tensor-parallel all-reduces overlap with compute, shrink, or vanish.

`import rewired` makes transformers' Auto classes know `rewired_llama` and its like. It does so when transformers is
imported, before or after us, and never imports it itself: `convert`, `info` and every `--help` start without it.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .families import FAMILIES, register_classes

__version__ = "0.1.0"


def _register() -> None:
    for family in FAMILIES.values():
        register_classes(family)


class _RegisterAfterImport(MetaPathFinder):
    """Lets the import system find transformers and our model as ever, and registers our classes after the import.

    Our model's modules import transformers, so imports nest; the outermost one registers, when all are complete.
    """

    depth = 0

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "transformers" and not fullname.startswith(f"{__name__}.model."):
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                self.depth += 1
                try:
                    run_module(module)
                finally:
                    self.depth -= 1
                if self.depth == 0 and self in sys.meta_path and "transformers" in sys.modules:
                    sys.meta_path.remove(self)
                    _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "transformers" in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _RegisterAfterImport())
