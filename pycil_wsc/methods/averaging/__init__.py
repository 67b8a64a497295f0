"""Methods that average or merge weights."""
