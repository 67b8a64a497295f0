"""What a learner predicts with, for other programs: ONNX, ``torch.export``, or a folder for the Hub and MLflow."""
