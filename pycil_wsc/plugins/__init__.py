"""Weight Space Consolidation in other training loops. Nothing in the package imports these modules."""
