"""Scripts that train to the end, and tell what becomes of quality."""
