"""Prompts: a frozen transformer, and tokens or keys and values that are learned for its blocks."""
