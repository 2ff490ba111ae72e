"""TODO purpose of this room."""
