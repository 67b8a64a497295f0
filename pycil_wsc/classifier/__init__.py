"""Trained learners in use: a run's weights as a classifier, and a classifier that is updated task by task."""
