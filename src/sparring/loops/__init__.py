"""The loops: one flat file each."""
