"""Tasks: which classes and samples each has."""
