"""Optimisers and learning-rate schedules. Every module here is imported, so a new file registers itself."""

from pycil_wsc.registry import import_all_of

import_all_of(__name__, __path__)
