"""Which values float16 cannot hold, and which modules stay in float32 because of them."""
