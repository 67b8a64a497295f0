"""The configuration: declares the keys, loads JSON files, fills in defaults, expands sweeps and checks values."""
