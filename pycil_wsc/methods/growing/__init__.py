"""Methods whose network grows with the tasks."""
