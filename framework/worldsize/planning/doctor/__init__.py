"""What an examination of a cluster has found, judged: pure functions of facts."""
