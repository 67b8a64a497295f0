"""The consolidation inside other training loops; nothing in the package imports these modules."""
