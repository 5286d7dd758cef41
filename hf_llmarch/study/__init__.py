"""Study: what a config implies, measured or derived, and architectures by name."""
