"""What a run records beside its results when ``"analyse"`` asks for it: a short file per analysis. A new file registers itself.

An analysis sees training data and exemplars, never the test set. It may take its time, but changes nothing: the results are equal
to the bit with and without.
"""

import importlib
import pkgutil

from pycil_wsc.analysis.records import Records

__all__ = ["Records"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
