"""What a run needs of a machine, told before it is started."""
