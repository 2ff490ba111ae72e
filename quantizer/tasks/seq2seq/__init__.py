"""Tasks of encoder-decoder models, which generate text: one engine per part."""
