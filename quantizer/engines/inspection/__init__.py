"""Contents of an engine: its layers, their formats and their multiply-adds."""
