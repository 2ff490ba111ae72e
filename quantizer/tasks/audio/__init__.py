"""Tasks of recordings: classes of sounds, and the words of speech."""
