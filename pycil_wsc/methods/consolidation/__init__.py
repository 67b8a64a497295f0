"""Weight Space Consolidation: the method ``wsc``, and ``"consolidate": true`` for others."""
