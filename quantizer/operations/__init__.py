"""The quantizable operations of torch, and the sizes of the products that they compute."""
