"""Methods without memory that penalise changes of important weights."""
