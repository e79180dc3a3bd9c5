"""What stands around training: executors, recovery, resuming, profiling, CUDA."""
