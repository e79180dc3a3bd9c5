"""Hold the sharding rule of each op: its loops over the dimensions of its tensors; a module for each family of ops."""
