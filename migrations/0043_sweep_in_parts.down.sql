DROP FUNCTION coppice_make_partitions_of(text, interval, integer);
DROP INDEX workspaces_live_checkpoint_idx;
DROP INDEX checkpoints_shown_child_idx;
DROP INDEX checkpoints_unpruned_idx;
