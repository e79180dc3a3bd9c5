"""Try public models, shrunken and with random weights, and write the table of docs/models.md: `make zoo`.

The packages come from the network and live in a virtual environment of their own. `run` installs them and tries the
models one after another, each in a process of its own; `judge` compares one model with plain PyTorch; the other modules
list models by library.
"""
