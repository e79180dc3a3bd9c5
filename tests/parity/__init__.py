"""Whatever strategy: the numbers of one device in plain PyTorch."""
