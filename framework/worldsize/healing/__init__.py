"""Continues training after processes die: memberships, process groups, transfer of state."""
