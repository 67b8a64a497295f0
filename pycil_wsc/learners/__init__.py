"""The methods: `base` has the training loop, and each method is a file that the registry finds in this folder."""
