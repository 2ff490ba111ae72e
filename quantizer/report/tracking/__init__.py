"""Results of a run in the form of experiment trackers: MLflow, TensorBoard, Weights & Biases."""
