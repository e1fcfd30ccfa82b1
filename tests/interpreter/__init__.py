"""Tests of GPU kernels on a CPU, under Triton's interpreter; run by `make test-fla` in an environment of its own."""
