"""Run folders, and the only code that reads and writes them."""
