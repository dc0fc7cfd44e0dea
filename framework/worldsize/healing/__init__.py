"""Training that continues after processes die: memberships, groups, transfer of state."""
