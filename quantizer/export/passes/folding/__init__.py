"""Passes that fold what follows a product or a normalization into its constants."""
