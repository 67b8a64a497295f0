"""Methods for a pre-trained backbone, which is frozen or tuned once."""
