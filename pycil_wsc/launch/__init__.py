"""Many runs: in this process, in worker processes, under torchrun, on Ray."""
