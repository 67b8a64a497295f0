"""One run, from tasks to result.json."""
