"""The records of a search for what goes back to float, and of the budget that it keeps."""
