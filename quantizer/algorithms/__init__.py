"""The calibration of a model: from batches to ranges, and from ranges to a plan."""
