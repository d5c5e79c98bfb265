"""Runs the steps: weights, KV pool, persistent batch, sampler. Imports `protocol` and `kernels`."""
