"""The configuration: keys declared once, JSON files loaded, completed with defaults, expanded into runs and checked."""
