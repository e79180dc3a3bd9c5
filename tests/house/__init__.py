"""Rules on the source tree and its documents: layers, folders, names, prose, public names."""
