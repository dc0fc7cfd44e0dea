"""Rehearses a run here: its real code, as any rank of a world of any size, without peers."""
