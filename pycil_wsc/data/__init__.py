"""Data sets, class order and tasks, batches, and exemplar memory."""
