"""From images to names: the network of a trained learner, and what is done to an image before it."""
