"""These tests run where Triton interprets its kernels, which it decides when it is imported: in a process of their own."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
