"""From overrides to objects, and the errors a user sees."""
