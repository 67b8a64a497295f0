"""Data sets, class order, tasks, batches and exemplar memory."""
