"""Rehearses a run on this machine: runs its real code as any rank of a world of any size, without the other ranks."""
