"""Data sets whose rows are files: images and recordings, with labels, masks or transcripts."""
