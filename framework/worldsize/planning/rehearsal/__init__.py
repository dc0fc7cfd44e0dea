"""Rehearses a run on this machine: its real code on any rank of a world of any size, whose other ranks are absent."""
