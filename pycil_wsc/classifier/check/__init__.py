"""Looks at images before a learner learns them."""
