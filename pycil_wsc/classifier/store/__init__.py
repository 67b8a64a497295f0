"""A learner between two tasks, and the folder that it is saved in."""
