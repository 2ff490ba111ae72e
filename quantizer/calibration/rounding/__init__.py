"""The rounding of weights by what they multiply."""
