"""Exemplar memory: which samples are kept, and values stored with them."""
