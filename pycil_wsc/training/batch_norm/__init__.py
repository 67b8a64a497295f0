"""Batch norm over a part of a batch, or over the parts that several processes have."""
