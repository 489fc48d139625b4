"""The tabs of the page, a file each."""
