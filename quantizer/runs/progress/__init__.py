"""The printed progress of a whole command: its stages, how long they may take, and a sign of life in each."""
