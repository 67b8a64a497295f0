"""The consolidation inside other people's training loops. Each module is imported by who needs it, and by nothing here."""
