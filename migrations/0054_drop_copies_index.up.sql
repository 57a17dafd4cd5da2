-- checkpoint_copies_sums_idx of 0050 does what it did.
DROP INDEX checkpoint_copies_runner_idx;
