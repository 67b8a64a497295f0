"""A toolbox for continual learning with abundant memory, built around Weight Space Consolidation.

Importing the package imports nothing else of it, so that ``pycil_wsc.consolidation`` fits into any code base.
"""
