"""What the command line does beyond a call of the library."""
