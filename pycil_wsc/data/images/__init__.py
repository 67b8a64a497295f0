"""Images: data sets by name, from arrays and from files."""
