"""What quantizing a group is worth in time, and plans that are fast enough."""
