"""Methods that keep a mean feature of each class instead of images."""
