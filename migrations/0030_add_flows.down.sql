DROP FUNCTION coppice_make_flow_partitions();
DROP TABLE flows;
ALTER TABLE checkpoints
    DROP COLUMN sandbox_id,
    DROP COLUMN instant_at;
