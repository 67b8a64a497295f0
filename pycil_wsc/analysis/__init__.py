"""Analyses that a run records in addition to its results, as listed in ``analyse``: one module per analysis.

The modules of this package are imported automatically. An analysis uses training data and exemplars, never the test
set. It may be slow, but does not change the results: they are equal to the bit with and without it.
"""

import importlib
import pkgutil

from pycil_wsc.analysis.records import Records

__all__ = ["Records"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
