"""Say of each op how its loops run over the dimensions of its tensors; one module for each family of ops."""
