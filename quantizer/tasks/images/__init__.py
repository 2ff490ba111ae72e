"""Tasks whose answer is in the places of an image: classes of pixels, distances, objects."""
