"""Batches on the device: their order, where they are read from, and their augmentation."""
