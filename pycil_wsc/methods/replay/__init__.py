"""Baselines, and methods that train on exemplars beside the new images."""
