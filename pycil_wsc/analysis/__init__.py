"""What a run records beside its results if ``analyse`` names it: one file per analysis, found by its folder.

An analysis sees training data and exemplars, never the test set. It may be slow, but changes nothing: the results are
equal to the bit with and without it.
"""

import importlib
import pkgutil

from pycil_wsc.analysis.records import Records

__all__ = ["Records"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
