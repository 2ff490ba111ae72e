"""The conversion of modules that functions return."""
