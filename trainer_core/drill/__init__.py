"""Faults on purpose: what `safe-scaler drill` and `benchmarks/detectors.py` put into a run to see whether it is
noticed.
"""
