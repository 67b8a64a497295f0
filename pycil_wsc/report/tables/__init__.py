"""Tables: cells aggregated over seeds, a function for each table, and the trials of a search for hyperparameters."""
