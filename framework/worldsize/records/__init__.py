"""What a run folder holds, and the only code that reads and writes it."""
