"""Modules of other packages that take long to import, and that planning does without."""

import importlib
from typing import Any


class Lazy:
    """Stands for the module ``name``, which is imported when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # what Python itself looks up, as for copies
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
