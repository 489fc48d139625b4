"""Optimised kernels, added here by attention backends; each is compared with its plain torch twin in `reference`.

Importing this package imports neither torch nor Triton. `packed`, `work` and `reference` need torch alone; the kernels need Triton too
(`pip install "recguide[kernels]"`). They are compiled when first called, so nothing of this package depends on a device.
"""
