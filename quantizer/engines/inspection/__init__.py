"""What an engine runs: its layers, their formats and their multiply-adds."""
