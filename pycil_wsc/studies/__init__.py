"""What only the paper's ablations and analyses need: baselines of the method, and observers of a run.

- Baselines: other importance scores (``importance``), other resets (``resets``, ``continual_backprop``).
- Analyses: additional records of a run, as listed in ``analyse``; one module each, with a subclass of ``Observer``. An
  analysis uses training data and exemplars, never the test set. It may be slow, but does not change the results: they
  are bit-identical with and without it.

The registry finds the modules of this package.
"""
