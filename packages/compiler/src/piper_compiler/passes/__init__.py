"""From a graph to a plan, in the order in which `piper_compiler.compile` calls the passes."""
