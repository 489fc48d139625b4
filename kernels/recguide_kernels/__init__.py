"""Optimised kernels, added here by attention backends; each is compared with its plain torch twin."""
