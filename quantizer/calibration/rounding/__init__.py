"""The factors and the codes of weights, by what they multiply and by each other."""
