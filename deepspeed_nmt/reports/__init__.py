"""Reports of runs: the page of a run, comparisons, sweeps, depths, and scores of test sets."""
