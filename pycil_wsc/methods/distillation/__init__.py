"""Methods that distil the network before the task."""
