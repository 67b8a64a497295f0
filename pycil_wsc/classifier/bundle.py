"""The door for MLflow: the file ``MLmodel`` of every exported folder names this module."""

from pycil_wsc.classifier.export.folder import _load_pyfunc as _load_pyfunc
