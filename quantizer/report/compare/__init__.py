"""Several runs side by side: what differs, how they score, and whether a difference is more than noise."""
