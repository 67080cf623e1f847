"""Container images as folders: found, built, unpacked once and shared by all runs. No daemon."""
