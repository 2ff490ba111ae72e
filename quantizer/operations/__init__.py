"""Which operations of torch are quantizable, and how large the products are that they compute."""
