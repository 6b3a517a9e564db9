"""Process groups: launching, rendezvous, collectives, tensor parallelism and the watchdog."""
