"""Rehearses a run on this machine: its real code, as any rank of any world size, without peers."""
