"""Values that float16 cannot hold, and the modules that stay in float32 because of them."""
