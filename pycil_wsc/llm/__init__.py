"""Continual instruction tuning: a language model learns the tasks of TRACE, or yours, one after another."""
