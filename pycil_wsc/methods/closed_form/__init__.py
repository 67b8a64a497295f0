"""Methods whose classifier is computed from features, without training it."""
