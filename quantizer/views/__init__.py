"""Tables and pictures that a quantizer shows in a terminal and in a notebook."""
