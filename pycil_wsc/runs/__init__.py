"""One run from tasks to result.json, and sweeps of many runs."""
