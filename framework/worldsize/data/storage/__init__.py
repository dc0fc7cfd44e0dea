"""Files of any size on this machine or another, of which parts are read, and what is kept of them on disk."""
