"""PyCIL's utilities under PyCIL's names, for scripts written for it. Nothing in ``pycil_wsc`` imports this."""
