"""Backbones, growing heads, and the networks that expand with the tasks."""
