"""What every room may use: arithmetic, a user's own folders, variables of the environment, settings as options."""
